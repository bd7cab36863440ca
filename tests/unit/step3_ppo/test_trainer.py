"""What the loop asks of its parts: samples of a prompt, greedy baselines, replacements, the coefficient of the KL."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.algorithm import checked_algorithm, experience_settings, learning_settings
from training.step3_ppo.algorithm_arguments import AlgorithmArguments
from training.step3_ppo.arguments import PpoArguments
from training.step3_ppo.prompt_source import ShuffledPrompts
from training.step3_ppo.records import Rollout
from training.step3_ppo.rollout.base import RolloutEngine, Sampling
from training.step3_ppo.settings import PpoSettings
from training.step3_ppo.trainer import PpoTrainer, _everyones_row_ids
from training.utils.data.phases import PromptRow
from training.utils.layout.documents import TokenSequence
from training.utils.layout.planner import PlanSettings
from training.utils.run.errors import Mistakes
from training.utils.run.seeds import derived_seed

CPU = torch.device("cpu")
PROMPTS = [PromptRow(index, np.array([10 + index], dtype=np.int32), f"prompt {index}", None) for index in range(20)]


class Engine(RolloutEngine):
    """One token a response: 5 where greedy, else 6, or what `token` makes of the prompt and the sample's number."""

    def __init__(self, token=lambda prompt, sample: 6) -> None:
        self.calls: list[SimpleNamespace] = []
        self.token = token

    def roll_out(self, model, prompt_ids_BP, prompt_mask_BP, sampling, seeds, samples_per_prompt=1) -> Rollout:
        prompt_ids_BP, prompt_mask_BP = (
            part.repeat_interleave(samples_per_prompt, dim=0) for part in (prompt_ids_BP, prompt_mask_BP)
        )
        prompts = prompt_ids_BP[:, -1].tolist()
        self.calls.append(SimpleNamespace(prompts=prompts, seeds=list(seeds), temperature=sampling.temperature))
        tokens = [5 if sampling.temperature == 0 else self.token(p, b % 2) for b, p in enumerate(prompts)]
        count = len(prompts)
        return Rollout(
            prompt_ids_BP, prompt_mask_BP, torch.tensor(tokens)[:, None], torch.ones(count, dtype=torch.int64),
            torch.full((count, 1), -1.0), torch.ones(count, dtype=torch.bool),
        )  # fmt: skip


def made_trainer(engine: Engine, rank: int = 0, world_size: int = 1, tries: int = 0, **flags) -> PpoTrainer:
    """Two samples of four prompts in all; a response's score is its token."""
    ppo = PpoArguments(
        num_samples_per_prompt=2, per_device_generation_batch_size=4 // world_size, clip_reward=100.0,
        per_device_training_batch_size=8 // world_size,
    )  # fmt: skip
    algorithm = checked_algorithm(AlgorithmArguments(**flags), ppo, Mistakes())
    assert algorithm is not None
    ranks = SimpleNamespace(rank=rank, world_size=world_size, device=CPU, is_main=True)
    roles = SimpleNamespace(
        actor=SimpleNamespace(ranks=ranks),
        critic=None,
        reference=object(),
        reward_model=lambda rows: rows.input_ids_NT.flatten()[rows.end_B].float(),
        whole_actor=SimpleNamespace(lent=lambda: contextlib.nullcontext()),
        average=None,
    )
    settings = PpoSettings(
        total_rollouts=3, prompts_per_batch=4 // world_size, generation_batches=1,
        sequences_per_minibatch=ppo.sequences_per_minibatch, ppo_epochs=1, critic_warmup=0,
        dynamic_sampling_tries=tries, eval_interval=0, seed=7, sampling=Sampling(4, 0.9, 0, 1.0, 0, 1),
        experience=experience_settings(algorithm, ppo, None, PlanSettings(1), 1),
        learning=learning_settings(algorithm, ppo),
    )  # fmt: skip
    return PpoTrainer(roles, engine, ShuffledPrompts(PROMPTS, 7), None, None, settings, None)


def test_samples_of_a_prompt_are_adjacent_with_seeds_of_their_own():
    engine = Engine()
    trainer = made_trainer(engine)
    prompts, seeds = trainer.next_prompts(1, 0)
    rollout = trainer.roll_out(prompts, seeds)
    (call,) = engine.calls
    assert call.prompts[0::2] == call.prompts[1::2] == [10 + row.row_id for row in prompts.rows]
    assert call.seeds == [seed for first in seeds for seed in (first, derived_seed(first, "sample", 1))]
    assert len(set(call.seeds)) == 8 and call.temperature == 0.9
    assert trainer.score(prompts, rollout).scored.scores_B.tolist() == [6.0] * 8


def test_the_greedy_baseline_is_one_response_a_prompt(monkeypatch):
    engine, given = Engine(), {}
    trainer = made_trainer(engine, advantage="remax")
    monkeypatch.setattr("training.step3_ppo.trainer.make_experience", lambda *parts: given.update(parts=parts))
    prompts, seeds = trainer.next_prompts(1, 0)
    trainer.experience_of(trainer.score(prompts, trainer.roll_out(prompts, seeds)))
    assert engine.calls[1].prompts == engine.calls[0].prompts[::2] and engine.calls[1].temperature == 0.0
    samples, greedy, _, settings, kl_coef, clock = given["parts"]
    assert {"1_prompts", "2_rollout", "3_score"} <= clock.read().keys()
    assert samples.scored.scores_B.tolist() == [6.0] * 8 and greedy.scored.outcomes_B.tolist() == [5.0] * 4
    assert settings.estimator is ESTIMATORS["remax"] and kl_coef == 0.1


def odd_prompts_differ(prompt: int, sample: int) -> int:
    return 6 + sample if prompt % 2 else 6


def replaced(world_size: int) -> list[list[int]]:
    """Each rank's prompts after one try to replace those that score alike (the even ones)."""
    found = []
    for rank in range(world_size):
        trainer = made_trainer(Engine(odd_prompts_differ), rank, world_size, tries=1, advantage="grpo")
        prompts, seeds = trainer.next_prompts(2, 0)
        samples = trainer.score(prompts, trainer.roll_out(prompts, seeds))
        samples = trainer.replace_equal_groups(samples, 2, 0)
        assert samples.rollout.prompt_ids_BP[::2, -1].tolist() == [10 + row.row_id for row in samples.rows]
        found.append([row.row_id for row in samples.rows])
    return found


def test_prompts_that_score_alike_are_replaced_by_others_the_same_ones_every_time():
    (before,) = [[row.row_id for row in made_trainer(Engine()).next_prompts(2, 0)[0].rows]]
    (after,) = replaced(1)
    assert sum(row % 2 == 0 for row in before) > sum(row % 2 == 0 for row in after)
    assert all(old == new or old % 2 == 0 and new % 2 for old, new in zip(before, after, strict=True))
    assert replaced(1) == [after]


def test_the_coefficient_follows_its_controller():
    trainer = made_trainer(Engine(), kl_control="adaptive", kl_target=1.0, kl_horizon=100.0)
    experiences = [SimpleNamespace(scores_B=torch.zeros(8))]
    trainer.steer_kl({"rollout/kl": 1.1}, experiences)
    assert trainer.kl_control.coefficient == pytest.approx(0.1 * (1 + 0.1 * 8 / 100))
    fixed = made_trainer(Engine())
    fixed.steer_kl({"rollout/kl": 9.0}, experiences)
    assert fixed.kl_control.coefficient == 0.1
    without = made_trainer(Engine(), kl_coef=0.0)
    without.roles = SimpleNamespace(**{**vars(without.roles), "reference": None})
    without.steer_kl({}, experiences)  # there is no such figure


COUNTS = SimpleNamespace(totals=SimpleNamespace(sequences=4.0))


def learning(monkeypatch, minibatch, figures: dict[str, float]) -> tuple[list[str], dict[str, float]]:
    """What one call of learn did, with two minibatches of eight pieces, and what it told."""
    trainer = made_trainer(Engine())
    did: list[str] = []
    monkeypatch.setattr("training.step3_ppo.trainer.pieces_of", lambda *given: list(range(16)))
    monkeypatch.setattr("training.step3_ppo.trainer.make_minibatch", lambda *given: minibatch)
    monkeypatch.setattr("training.step3_ppo.trainer.learn_minibatch", lambda *given: did.append("step") or figures)
    trainer.roles.average = SimpleNamespace(update=lambda: did.append("average"))
    rows = [SimpleNamespace(row_id=10 + index) for index in range(8)]
    return did, trainer.learn([], 1, rows)


def test_a_minibatch_of_which_nothing_counts_takes_no_step(monkeypatch):
    nothing = SimpleNamespace(totals=SimpleNamespace(sequences=0.0))
    assert learning(monkeypatch, nothing, {}) == ([], {"train/minibatches": 0.0, "train/empty_minibatches": 2.0})
    did, told = learning(monkeypatch, COUNTS, {"actor/skipped": 0.0})
    assert did == ["step", "average"] * 2
    assert told == {"actor/skipped": 0.0, "train/minibatches": 2.0, "train/empty_minibatches": 0.0}


def test_row_ids_of_all_ranks_stand_where_their_pieces_do(monkeypatch):
    """Prompts are dealt to ranks one by one: the first of each rank, then the second of each."""
    monkeypatch.setattr("training.step3_ppo.trainer.gathered", lambda own: [own, [row + 100 for row in own]])
    rows = [SimpleNamespace(row_id=7), SimpleNamespace(row_id=8)]
    assert _everyones_row_ids(rows, 2) == [7, 7, 107, 107, 8, 8, 108, 108]


def test_a_skipped_step_is_counted_and_leaves_the_average_alone(monkeypatch, capsys):
    did, told = learning(monkeypatch, COUNTS, {"actor/skipped": 1.0, "actor/policy_loss": float("nan")})
    assert did == ["step", "step"] and told["actor/skipped"] == 1.0
    assert "2 of --max_bad_steps 10" in capsys.readouterr().out


def test_the_first_rollouts_train_the_critic_alone(monkeypatch):
    trainer = made_trainer(Engine(), advantage="gae")
    trainer.settings = dataclasses.replace(trainer.settings, critic_warmup=2)
    told: list[bool] = []
    monkeypatch.setattr("training.step3_ppo.trainer.pieces_of", lambda *given: list(range(8)))
    monkeypatch.setattr("training.step3_ppo.trainer.make_minibatch", lambda *given: COUNTS)
    monkeypatch.setattr("training.step3_ppo.trainer.learn_minibatch", lambda *given: told.append(given[-2]) or {})
    for iteration in (1, 2, 3):
        trainer.learn([], iteration)
    assert told == [False, False, True]


def test_the_moving_average_counts_every_step_of_the_actor(monkeypatch):
    trainer = made_trainer(Engine(), advantage="gae")
    trainer.settings = dataclasses.replace(trainer.settings, critic_warmup=1, ppo_epochs=2)
    told: list[str] = []
    monkeypatch.setattr("training.step3_ppo.trainer.pieces_of", lambda *given: list(range(16)))
    monkeypatch.setattr("training.step3_ppo.trainer.make_minibatch", lambda *given: COUNTS)
    monkeypatch.setattr(
        "training.step3_ppo.trainer.learn_minibatch", lambda *given: told.append("step") or {"actor/skipped": 0.0}
    )
    trainer.roles.average = SimpleNamespace(update=lambda: told.append("average"))
    trainer.learn([], 1)
    assert told == ["step"] * 4  # two epochs of two minibatches; the critic alone
    trainer.learn([], 2)
    assert told[4:] == ["step", "average"] * 4


def test_the_trainers_own_state_comes_back():
    trainer, other = (made_trainer(Engine(), kl_control="adaptive") for _ in range(2))
    trainer.kl_control.update(100.0, 64)
    trainer.texts_taken = 5
    state = json.loads(json.dumps(trainer.state_dict()))
    assert state["kl_control"]["coefficient"] != other.kl_control.coefficient
    other.load_state_dict(state)
    assert other.state_dict() == state and other.texts_taken == 5


def test_updates_end_where_their_kl_is_too_large(monkeypatch):
    """Two epochs of two minibatches; the second minibatch goes beyond 0.05."""
    trainer = made_trainer(Engine(), advantage="gae")
    trainer.settings = dataclasses.replace(trainer.settings, ppo_epochs=2, stop_update_kl=0.05)
    kls = iter([0.01, 0.07, 0.5, 0.5])
    monkeypatch.setattr("training.step3_ppo.trainer.pieces_of", lambda *given: list(range(16)))
    monkeypatch.setattr("training.step3_ppo.trainer.make_minibatch", lambda *given: COUNTS)
    monkeypatch.setattr("training.step3_ppo.trainer.learn_minibatch", lambda *given: {"actor/update_kl": next(kls)})
    figures = trainer.learn([], 1)
    assert figures == {
        "actor/update_kl": pytest.approx(0.04),
        "train/minibatches": 2.0,
        "train/empty_minibatches": 0.0,
    }
    trainer.settings = dataclasses.replace(trainer.settings, stop_update_kl=None)
    kls = iter([0.01, 0.07, 0.5, 0.5])
    assert trainer.learn([], 1)["train/minibatches"] == 4.0


def test_what_updates_are_worth_in_flops(monkeypatch):
    """A layout of one prompt token that two samples share and two tokens a response, 5 in all: no matter how many
    epochs share the time, each minibatch counts its part."""
    trainer = made_trainer(Engine(), advantage="gae")
    told = []
    meter = SimpleNamespace(flops=lambda documents, reads: told.append((documents, reads)) or 10.0)
    trainer.settings = dataclasses.replace(trainer.settings, meters=(meter, meter), ppo_epochs=3)
    ids, is_target = torch.tensor([1, 2, 3]), torch.tensor([False, True, True])
    pieces = [SimpleNamespace(sequence=TokenSequence(ids, is_target)) for _ in range(16)]
    monkeypatch.setattr("training.step3_ppo.trainer.pieces_of", lambda *given: pieces)
    monkeypatch.setattr("training.step3_ppo.trainer.make_minibatch", lambda *given: COUNTS)
    monkeypatch.setattr("training.step3_ppo.trainer.learn_minibatch", lambda *given: {})
    figures = trainer.learn([], 1)
    assert figures["learn/flops"] == 3 * (10.0 + 10.0)  # three epochs of actor and critic
    assert told[0][1] == 32 and sum(document.tokens for document in told[0][0]) == 48
    trainer.settings = dataclasses.replace(trainer.settings, critic_warmup=1)
    assert trainer.learn([], 1)["learn/flops"] == 3 * 10.0  # the critic alone


def test_the_kl_ends_the_training():
    trainer = made_trainer(Engine())
    assert not trainer.kl_is_over({"rollout/kl": 1e9})
    trainer.settings = dataclasses.replace(trainer.settings, stop_kl=2.0)
    assert trainer.kl_is_over({"rollout/kl": 2.1}) and not trainer.kl_is_over({"rollout/kl": 2.0})
    assert not trainer.kl_is_over({})  # a run that begins
