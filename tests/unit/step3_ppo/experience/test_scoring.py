"""A response's score: the weighted sum of its rewards, of which functions work while the models do."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.rollouts import rollout_of
from tests.support.step3_records import changed
from tests.unit.step3_ppo.experience.test_experience import how
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.experience import scoring
from training.step3_ppo.experience.experience import make_experience
from training.step3_ppo.experience.scoring import start_scoring
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rows import PromptRow
from training.utils.models.token_model import TokenLogprobs
from training.utils.rewards.arguments import Combination
from training.utils.rewards.table import OpenedRule
from training.utils.rewards.weighted import Reward, Rewards
from training.utils.run.phase_clock import PhaseClock

ROWS = [PromptRow(index, np.array([10 + index]), f"prompt {index}", f"truth {index}") for index in range(2)]
TEXTS = ["a", "bb", "ccc", "dddd"]


def rollout() -> Rollout:
    """Two samples of two prompts; the last response did not end."""
    ended_B = torch.tensor([True, True, True, False])
    return rollout_of([[10], [10], [11], [11]], [[1], [2], [3], [4]], ended_B=ended_B)


def settings(*named: Reward, timeout: float = 30.0, **changes):
    rewards = Rewards(named, timeout, ("level",), lambda given: TEXTS[: len(given.ended_B)])
    return how(samples_per_prompt=2, rewards=rewards, **changes)


@pytest.fixture
def model(monkeypatch):
    """Stands in for the reward model; its `calls` are counted."""
    calls = []

    def score(*given):
        calls.append(given)
        return torch.tensor([1.0, -1.0, 0.5, 2.0])

    monkeypatch.setattr(scoring, "score", score)
    return calls


def lengths(prompts, responses, *, ground_truth, level, data_source):
    assert prompts == ["prompt 0", "prompt 0", "prompt 1", "prompt 1"]
    assert ground_truth == ["truth 0", "truth 0", "truth 1", "truth 1"] and level == data_source == [None] * 4
    return [len(response) for response in responses], {"even": [len(response) % 2 == 0 for response in responses]}


def test_the_weighted_sum_by_hand(model):
    how_to = settings(Reward("lengths", 2.0, lengths), Reward("model", 0.5, None))
    how_to = changed(how_to, missing_eos_penalty=3.0)
    samples = start_scoring(ROWS, rollout(), None, how_to)
    # 2 x (1, 2, 3, 4) + 0.5 x (1, -1, 0.5, 2); the last did not end, which takes 3 off the outcome alone.
    assert samples.scored.scores_B.tolist() == [2.5, 3.5, 6.25, 9.0]
    assert samples.scored.outcomes_B.tolist() == [2.5, 3.5, 6.25, 6.0]
    parts = {name: part.tolist() for name, part in samples.scored.parts.items()}
    assert parts == {
        "lengths": [1.0, 2.0, 3.0, 4.0],
        "lengths/even": [0.0, 1.0, 0.0, 1.0],
        "model": [1.0, -1.0, 0.5, 2.0],
    }
    assert samples.rows == tuple(ROWS) and len(model) == 1 and samples.scored is samples.scored


def test_samples_of_a_prompt_that_are_alike_have_one_outcome(monkeypatch):
    scores_B = torch.tensor([2.0, 2.0 + 1.5e-5, 3.0, 3.001])
    monkeypatch.setattr(scoring, "score", lambda *given: scores_B)
    found = start_scoring(ROWS, rollout(), None, settings(Reward("model", 1.0, None))).scored
    assert found.outcomes_B.tolist() == scores_B[[1, 1, 2, 3]].tolist()
    assert found.scores_B.equal(scores_B)  # reported as they are


def test_the_model_alone_is_as_it_was_to_the_bit_and_is_not_asked_in_vain(model):
    samples = start_scoring(ROWS, rollout(), None, how(samples_per_prompt=2))
    assert torch.equal(samples.scored.scores_B, scoring.score()) and list(samples.scored.parts) == ["model"]
    model.clear()
    samples = start_scoring(ROWS, rollout(), None, settings(Reward("lengths", -1.0, lengths)))
    assert samples.scored.scores_B.tolist() == [-1.0, -2.0, -3.0, -4.0] and model == []


def test_the_function_works_while_the_forwards_go_on(model):
    """It waits for the actor's forward, which comes after part 3, and for that of the reference after it."""
    forwards, waited = [threading.Event(), threading.Event()], []

    def slow(prompts, responses, **columns):
        waited.append(all(forward.wait(10) for forward in forwards))
        return [float(len(response)) for response in responses]

    def forward(event, rows, *_, **__):
        event.set()
        zeros_M = torch.zeros(rows.target_ids_M.shape)
        return TokenLogprobs(zeros_M, zeros_M, zeros_M.bool(), None)

    reading = threading.Lock()
    roles = SimpleNamespace(
        actor=lambda *given, **more: forward(forwards[0], *given),
        reference=lambda *given, **more: forward(forwards[1], *given),
        critic=None, reading=lambda: reading, actor_model=SimpleNamespace(dtype=torch.float32), experts=None,
    )  # fmt: skip
    how_to = settings(Reward("slow", 1.0, slow), estimator=ESTIMATORS["rloo"])
    made = make_experience(start_scoring(ROWS, rollout(), roles, how_to), roles, how_to, 0.1, clock=PhaseClock())
    assert waited == [True] and made.scored.scores_B.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert made.scored.parts["slow"].tolist() == made.scored.scores_B.tolist()


def test_the_time_limit():
    never = threading.Event()
    how_to = settings(Reward("slow", 1.0, lambda *texts, **columns: never.wait(30)), timeout=0.05)
    samples = start_scoring(ROWS, rollout(), None, how_to)
    with pytest.raises(ThreestepError, match="reward function 'slow' did not return within --reward_timeout 0.05 sec"):
        _ = samples.scored
    never.set()


@pytest.mark.parametrize("strange", [float("nan"), float("-inf")])
def test_a_score_that_is_no_number_names_its_sample(model, monkeypatch, strange):
    strange_B = torch.tensor([1.0, 0.0, strange, 2.0])
    monkeypatch.setattr(scoring, "score", lambda *given: strange_B)
    samples = start_scoring(ROWS, rollout(), SimpleNamespace(), settings(Reward("model", 1.0, None)))
    with pytest.raises(ThreestepError) as error:
        samples.scored  # noqa: B018
    assert str(error.value).startswith(
        f"the reward model's score is {strange} for 1 of 4 samples, the first in row 1 (uid {ROWS[1].uid}); the "
        "prompt ends in 'prompt 1', and the response ids begin with [3]: "
    )


@pytest.mark.parametrize(
    ("weights", "penalty", "what"),
    [
        (
            (2e37, 2e37),
            0.0,
            r"got inf for 1 of 4 .* row 1 \(uid .* are large 2e\+38, also 2e\+38: use smaller weights",
        ),
        ((1e38, 1.0), 0.0, r"got inf for 1 of 4 .* are large inf, also 10: "),
        ((1e38, -1e38), 0.0, r"got nan for 1 of 4 .* are large inf, also -inf: "),
        ((-3e37, 0.0), 3e38, "got -inf for 1 of 4 .* or smaller rewards and penalties"),  # what its end takes off
    ],
)
def test_a_sum_that_overflows_names_its_sample(weights, penalty, what):
    """Each number is finite."""

    def large(prompts, responses, **columns):
        return [0.0, 0.0, 0.0, 10.0]

    how_to = settings(Reward("large", weights[0], large), Reward("also", weights[1], large))
    how_to = changed(how_to, missing_eos_penalty=penalty)
    with pytest.raises(ThreestepError, match=what):
        _ = start_scoring(ROWS, rollout(), None, how_to).scored


def test_a_reward_that_does_not_apply_to_a_response(capsys):
    """As TRL has it: the score is the sum of the others."""

    def some(prompts, responses, **columns):
        return [None, 1.0, None, 3.0]

    def others(prompts, responses, **columns):
        return [5.0, None, 7.0, 8.0]

    how_to = settings(Reward("some", 2.0, some), Reward("more", 0.5, others))
    scored = start_scoring(ROWS, rollout(), None, how_to).scored
    assert scored.scores_B.tolist() == [2.5, 2.0, 3.5, 10.0]
    assert scored.parts["some"].isnan().tolist() == [True, False, True, False]
    assert not capsys.readouterr().out
    scored = start_scoring(ROWS, rollout(), None, settings(Reward("some", 2.0, some))).scored
    assert scored.scores_B.tolist() == [0.0, 2.0, 0.0, 6.0]
    assert capsys.readouterr().out == (
        "warning: no reward applies to 2 of 4 responses, so they score 0: some returned None, first for row 0 (uid "
        f"{ROWS[0].uid})\n"
    )


def test_an_ensemble_takes_what_its_members_agree_on(model):
    """Rewards times their weights, by hand: 2 x (1, 2, 3, 4) and (1, -1, 0.5, 2); the third is of weight 0."""
    shown = Reward("shown", 0.0, lambda prompts, responses, **columns: [9.0] * 4)
    named = (Reward("lengths", 2.0, lengths), Reward("model", 1.0, None), shown)
    expected = {
        "mean": [1.5, 1.5, 3.25, 5.0],
        "minimum": [1.0, -1.0, 0.5, 2.0],
        "mean_minus_deviations": [1.5 - 0.25, 1.5 - 1.25, 3.25 - 1.375, 5.0 - 1.5],
    }
    for kind, scores in expected.items():
        how_to = settings(*named)
        rewards = replace(how_to.scoring.rewards, combination=Combination(kind, 0.5))
        how_to = replace(how_to, scoring=replace(how_to.scoring, rewards=rewards))
        assert start_scoring(ROWS, rollout(), None, how_to).scored.scores_B.tolist() == scores


def test_a_server_that_reads_tokens_is_handed_them():
    class Reads(OpenedRule):
        reads_ids = True

        def check(self, replay):
            raise AssertionError("it is made by hand")

        def open(self, place):
            raise AssertionError("there is no run")

        def __call__(self, prompts, responses, *, prompt_ids, response_ids, **columns):
            assert prompt_ids == [[10], [10], [11], [11]]
            return [ids[0] for ids in response_ids]

    rule = Reads()
    how_to = settings(Reward("server", 1.0, rule), Reward("lengths", 0.0, lambda p, r, **c: [1.0] * 4))
    assert start_scoring(ROWS, rollout(), None, how_to).scored.scores_B.tolist() == [1.0, 2.0, 3.0, 4.0]
