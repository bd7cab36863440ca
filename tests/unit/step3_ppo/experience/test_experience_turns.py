"""Conversations in step 3: what others say changes no advantage, and turns are rewarded at their ends."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.step3_records import changed
from tests.unit.step3_ppo.experience.test_experience import how
from threestep.plugins.replay.files import DumpingRollout, ReplayRollout
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageSettings
from training.step3_ppo.contracts.records import Samples, Scored
from training.step3_ppo.contracts.settings import ExperienceSettings, KlSettings, LengthSettings
from training.step3_ppo.experience.description import conversation_means
from training.step3_ppo.experience.experience import make_experience
from training.step3_ppo.experience.scoring import outcome_scores, score, start_scoring
from training.step3_ppo.kl import KlControl
from training.step3_ppo.parts.evaluation import conversation_columns
from training.utils.contracts.rollout import FORK_LINE, ConversationRecord, Conversations, Rollout
from training.utils.contracts.rollout_engine import RolloutEngine, RolloutRequest, Sampling, rolled_out
from training.utils.contracts.rows import PromptRow
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.planner import PlanSettings
from training.utils.models.token_model import TokenLogprobs
from training.utils.rewards.weighted import Reward, Rewards
from training.utils.run.phase_clock import PhaseClock

ENVIRONMENT = Rewards((Reward("environment", 1.0, None),), 30.0)


def says(rows: TokenRows, *_: object, **__: object) -> TokenLogprobs:
    """In place of an actor: numbers that follow from a token alone."""
    ids_M = rows.target_ids_M
    logprobs_M = -0.1 - (ids_M % 7) / 10
    return TokenLogprobs(logprobs_M, logprobs_M, ids_M > 0, None, collisions_M=(ids_M % 3) / 10)


def values(rows: TokenRows, **_: object) -> torch.Tensor:
    return (rows.target_ids_M % 5) / 3


ROLES = SimpleNamespace(
    actor=says, critic=values, reading=torch.no_grad, reward_model=None,
    actor_model=SimpleNamespace(dtype=torch.float32), experts=None,
    reference=lambda rows, *_, **__: says(rows)._replace(logprobs_M=-0.3 - (rows.target_ids_M % 4) / 10),
)  # fmt: skip


def conversations(observations: int, turns_rewarded: bool = True, forks: bool = False) -> Rollout:
    """Eight conversations of 9 to 16 drawn tokens; `observations` of one to four tokens are said in between, the first
    of them behind the second drawn token, at which half of the reward stands. With `forks` each begins another
    sequence."""
    generator = torch.Generator().manual_seed(5)
    chances = torch.Generator().manual_seed(observations)
    rows = []
    for number in range(8):
        length = 9 + number
        drawn = torch.randint(3, 60, (length,), generator=generator).tolist()
        behind = {2 + int(place) for place in torch.randperm(length - 3, generator=chances)[: max(observations - 1, 0)]}
        behind |= {1} if observations else set()
        ids, inserted, rewards = [], [], []
        for place, token in enumerate(drawn):
            ids.append(token)
            inserted.append(False)
            rewards.append((number % 3) / 2 if place in (1, length - 1) and turns_rewarded else 0.0)
            if place in behind and place < length - 1:
                said = torch.randint(3, 60, (1 + int(torch.randint(4, (1,), generator=chances)),), generator=chances)
                ids += said.tolist()
                inserted += [True] * len(said)
                rewards += [0.0] * len(said)
        rows.append((ids, inserted, rewards))
    width = max(len(ids) for ids, _, _ in rows)
    padded = [[list(part) + [0] * (width - len(part)) for part in row] for row in rows]
    ids_BR, inserted_BR, rewards_BR = (torch.tensor([row[column] for row in padded]) for column in range(3))
    lengths_B = torch.tensor([len(ids) for ids, _, _ in rows])
    prompts_BP, alive = torch.tensor([[7, 8]] * 4 + [[9, 7]] * 4), torch.arange(width) < lengths_B[:, None]
    sampled_BR = torch.where(alive & ~inserted_BR.bool(), -0.15 - (ids_BR % 7) / 10, 0.0)
    begins_BR = inserted_BR.bool() & ~torch.nn.functional.pad(inserted_BR.bool()[:, :-1], (1, 0))
    return Rollout(
        prompts_BP, torch.ones_like(prompts_BP).bool(), ids_BR, lengths_B, sampled_BR, torch.ones(8).bool(),
        inserted=Conversations(
            tuple(ConversationRecord(2, None, {"right": float(n % 2)}) for n in range(8)),
            inserted_BR=inserted_BR.bool(), turn_rewards_BR=rewards_BR.float(), fork_begins_BR=begins_BR & forks,
        ),
    )  # fmt: skip


def made(rollout: Rollout, settings: ExperienceSettings, kl_coef: float = 0.1):
    rows = [PromptRow(n, np.array([7]), "", None) for n in range(2)]
    settings = changed(settings, rewards=ENVIRONMENT)
    samples = start_scoring(rows, rollout, ROLES, settings)
    greedy = None
    if settings.estimator.needs_greedy:
        scores_B = torch.tensor([0.25, 0.5])
        greedy = Samples((), rollout, lambda: Scored(scores_B, scores_B, {}))
    return make_experience(samples, ROLES, settings, kl_coef, clock=PhaseClock(), greedy=greedy)


FIELDS = ("scored.scores_B", "rewards_BR", "advantages_BR", "returns_BR", "old_logprobs_BR", "read.ref_logprobs_BR",
          "corrected.weights_BR")  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"none"}))  # which has no advantages
def test_what_others_say_changes_no_advantage(name):
    """None to five observations, appended or each in a fork: KL, turn rewards, correction, whitening and the punishment
    of length in between."""
    from threestep.plugins.mismatch.correction import MismatchCorrection
    from threestep.plugins.mismatch.settings import MismatchSettings

    settings = how(
        temperature=1.0, samples_per_prompt=4, estimator=ESTIMATORS[name],
        whiten_advantages=ESTIMATORS[name].whitens,
        correction=MismatchCorrection(MismatchSettings("truncate", "token", 1.05)),
        length=LengthSettings(20, overlong_buffer_tokens=12, overlong_penalty=0.5),
    )  # fmt: skip
    bare = made(conversations(0), settings)
    assert bare.advantages_BR.any() and bare.scored.scores_B.any()
    for observations in range(1, 6):
        rollout = conversations(observations, forks=observations % 2 == 0)
        assert rollout.inserted_BR.any(dim=1).all()
        assert rollout.conversations.fork_begins_BR.any(dim=1).all() == (observations % 2 == 0)
        found = made(rollout, settings)
        for field in FIELDS:
            wanted, got = attrgetter(field)(bare), attrgetter(field)(found)
            assert (wanted is None) == (got is None)
            assert wanted is None or torch.allclose(got, wanted, atol=1e-6), field


@pytest.mark.parametrize("forks", [False, True])
def test_gae_over_two_turns_by_hand(forks):
    """Drawn a b | c d with an observation in between, which may begin a fork, values 1 2 3 4; the environment pays 0.5
    for the first turn and 1.5 for the second; gamma 0.9, lambda 0.8, so that A decays by 0.72 a drawn token:

        d: delta 1.5 - 4           = -2.5    A -2.5
        c: delta 0.9 x 4 - 3       =  0.6    A  0.6 - 0.72 x 2.5   = -1.2
        b: delta 0.5 + 0.9 x 3 - 2 =  1.2    A  1.2 - 0.72 x 1.2   =  0.336
        a: delta 0.9 x 2 - 1       =  0.8    A  0.8 + 0.72 x 0.336 =  1.04192
    """
    ids_BR = torch.tensor([[11, 12, 30, 31, 32, 13, 14]])
    inserted_BR = torch.tensor([[False, False, True, True, True, False, False]])
    rollout = Rollout(
        torch.tensor([[5]]), torch.ones(1, 1).bool(), ids_BR, torch.tensor([7]), torch.zeros(1, 7),
        torch.ones(1).bool(), inserted=Conversations(
            (ConversationRecord(2, None, {}),), inserted_BR,
            turn_rewards_BR=torch.tensor([[0, 0.5, 0, 0, 0, 0, 1.5]]),
            fork_begins_BR=torch.tensor([[False, False, forks, False, False, False, False]]),
        ),
    )  # fmt: skip
    assert len(rollout.sequences()[0].parts) == 1 + forks
    critic = lambda rows, **_: (rows.target_ids_M - 10).float()  # noqa: E731
    roles = SimpleNamespace(**{**vars(ROLES), "critic": critic})
    settings = how(
        temperature=1.0, advantage=AdvantageSettings(0.9, 0.8, True), rewards=ENVIRONMENT,
        kl=KlSettings(KlControl(0.0), in_loss=False, estimator=how().kl.estimator),
    )  # fmt: skip
    samples = start_scoring([PromptRow(0, np.array([5]), "", None)], rollout, roles, settings)
    assert samples.scored.scores_B.tolist() == [2.0] and samples.scored.parts["environment"].tolist() == [2.0]
    found = make_experience(samples, roles, settings, 0.0, clock=PhaseClock())
    assert torch.allclose(found.rewards_BR, torch.tensor([[0, 0.5, 0, 1.5]]))
    assert torch.allclose(found.advantages_BR, torch.tensor([[1.04192, 0.336, -1.2, -2.5]]), atol=1e-6)


def test_the_reward_model_reads_the_last_sequence_of_a_conversation_that_forks():
    """Once each, up to its end."""
    rollout, read = conversations(3, forks=True), []

    def widths(rows: TokenRows) -> torch.Tensor:
        read.append(rows.input_ids_NT.shape)
        return rows.end_B.float()

    found = score(
        rollout,
        SimpleNamespace(reward_model=widths, scorer=None),
        how(plan=PlanSettings(1, max_rows_per_micro_batch=1)),
    )
    parts = [each.parts for each in rollout.sequences()]
    assert found.tolist() == [len(each[-1]) - 1 for each in parts] and len(read) == 8 and max(map(len, parts)) > 2


def test_weights_of_rewards_hold_for_each_turn():
    """Beside a rule: the rule's part stands at the end, the environment's at its turns, with its weight."""
    rollout, seen = conversations(2), []

    def rule(prompts, responses, drawn_turns, **columns):
        seen.append((responses, drawn_turns))
        return [3.0] * len(responses)

    named = (Reward("environment", 2.0, None), Reward("rule", 1.0, rule))
    text = lambda ids: " ".join(map(str, ids.tolist()))  # noqa: E731
    rewards = Rewards(named, 30.0, (), lambda r: r.texts(text, {1}), lambda r: r.turn_texts(text, {1}))
    rows = [PromptRow(n, np.array([7]), "", None) for n in range(2)]
    kl = KlSettings(KlControl(0.0), in_loss=True, estimator=how().kl.estimator)
    settings = how(samples_per_prompt=4, rewards=rewards, kl=kl)
    samples = start_scoring(rows, rollout, ROLES, settings)
    found = make_experience(samples, ROLES, settings, 0.0, clock=PhaseClock())
    number = torch.arange(8) % 3 / 2
    assert torch.allclose(found.scored.scores_B, 4 * number + 3)
    assert torch.allclose(found.rewards_BR[:, 1], 2 * number)
    last = found.rewards_BR.gather(1, rollout.drawn.lengths_B[:, None] - 1)[:, 0]
    assert torch.allclose(last, 2 * number + 3)
    ((responses, turns),) = seen
    # A rule reads what the model drew: as the response the last turn, and all of them beside it.
    drawn = rollout.response_ids_BR[0][rollout.response_mask_BR[0] & ~rollout.inserted_BR[0]]
    assert " ".join(turns[0]) == text(drawn) and responses == [own[-1] for own in turns] and len(turns[0]) == 3


def test_figures_of_conversations():
    rollout = conversations(1)
    records = tuple(
        ConversationRecord(n, "turns" if n == 4 else None, {"right": 1.0} if n % 2 else {}) for n in range(1, 9)
    )
    first = dataclasses.replace(rollout, inserted=dataclasses.replace(rollout.conversations, records=records))
    figures = conversation_means([SimpleNamespace(rollout=first)])
    assert figures["conversation/turns"] == 4.5 and figures["environment/right"] == 0.5
    assert figures["conversation/cut_by_turns"] == 1 / 8 and figures["conversation/cut_by_tokens"] == 0.0
    assert conversation_means([SimpleNamespace(rollout=dataclasses.replace(first, inserted=None))]) == {}
    assert outcome_scores(first, torch.zeros(8), LengthSettings(16, 0.0, 16, 1.0)).tolist() == pytest.approx(
        [-length / 16 for length in range(9, 17)]  # of the drawn tokens, without what is said in between
    )


def test_a_conversation_that_forks_is_replayed_as_it_was_drawn(tmp_path):
    class Given(RolloutEngine):
        def roll_out(self, model, request) -> Rollout:
            return conversations(2, forks=True)

    ids_BP = torch.tensor([[7, 8], [9, 7]])
    request = RolloutRequest(ids_BP, torch.ones_like(ids_BP).bool(), Sampling(40, 1.0, 0, 1.0, 1, 0), range(8), 4)
    drawn, again = (
        rolled_out(engine, None, request)
        for engine in (DumpingRollout(Given(), tmp_path, 0), ReplayRollout(tmp_path, 0))
    )
    for one, other in zip(drawn.sequences(), again.sequences(), strict=True):
        assert one.forks == other.forks != () and torch.equal(one.is_target, other.is_target)
    shown = conversation_columns(again, lambda ids: " ".join(map(str, ids.tolist())), {1})
    assert [text.count(FORK_LINE) for text in shown["response"]] == [len(each.forks) for each in again.sequences()]
    for parts, each in zip(shown["parts"], again.sequences(), strict=True):
        assert [who for who, text in parts if FORK_LINE in text] == ["environment"] * len(each.forks)
        assert all(text.startswith(FORK_LINE) for _, text in parts if FORK_LINE in text)
