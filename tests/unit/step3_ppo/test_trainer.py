"""What the loop asks of its parts: samples of a prompt, greedy baselines, replacements, updates, the coefficient of the
KL. Models are tiny and real; a rollout engine that draws given tokens stands in for generation."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.plain_roles import plain_roles
from tests.support.step3_records import changed as changed_settings
from tests.support.step3_records import made as made_settings
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.contracts.records import Experience
from training.step3_ppo.contracts.rollouts import PromptSource
from training.step3_ppo.contracts.settings import PpoSettings
from training.step3_ppo.flags.algorithm import experience_settings, learning_settings, selected_algorithm
from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
from training.step3_ppo.learning.learning import Updates
from training.step3_ppo.learning.notes import row_ids_of_all_ranks
from training.step3_ppo.trainer import PpoTrainer
from training.utils.base.errors import Mistakes
from training.utils.base.seeds import derived_seed
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import RolloutEngine, Sampling
from training.utils.contracts.rows import PromptRow
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout

PROMPTS = [PromptRow(index, np.array([10 + index], dtype=np.int32), f"prompt {index}", None) for index in range(20)]


class Engine(RolloutEngine):
    """Responses of `length` equal tokens: 5 where greedy, else what `token` makes of the prompt and the sample's
    number."""

    def __init__(self, token=lambda prompt, sample: 6, length: int = 1) -> None:
        self.calls: list[SimpleNamespace] = []
        self.token, self.length = token, length

    def roll_out(self, model, request) -> Rollout:
        prompt_ids_BP, prompt_mask_BP = request.repeated()
        seeds, sampling = request.seeds, request.sampling
        prompts = prompt_ids_BP[:, -1].tolist()
        self.calls.append(SimpleNamespace(prompts=prompts, seeds=list(seeds), temperature=sampling.temperature))
        tokens = [5 if sampling.temperature == 0 else self.token(p, b % 2) for b, p in enumerate(prompts)]
        count = len(prompts)
        return Rollout(
            prompt_ids_BP, prompt_mask_BP, torch.tensor(tokens)[:, None].repeat(1, self.length),
            torch.full((count,), self.length), torch.full((count, self.length), -1.0),
            torch.ones(count, dtype=torch.bool),
        )  # fmt: skip


def last_tokens(rows) -> torch.Tensor:
    """In place of a reward model: a response's score is its last token."""
    return rows.input_ids_NT.flatten()[rows.end_B].float()


def made_trainer(
    engine: Engine, rank: int = 0, world_size: int = 1, tries: int = 0, rate: float = 0.0, changed=None, **flags
) -> PpoTrainer:
    """Two samples of four prompts in all. rate: of the optimizers. changed: fields of PpoSettings."""
    ppo = PpoArguments(
        num_samples_per_prompt=2, per_device_generation_batch_size=4 // world_size, clip_reward=100.0,
        per_device_training_batch_size=8 // world_size, ppo_epochs=(changed or {}).get("ppo_epochs", 1),
    )  # fmt: skip
    algorithm = selected_algorithm(AlgorithmArguments(**flags), ppo, Mistakes())
    assert algorithm is not None
    ranks = Ranks(rank, rank, world_size, torch.device("cpu"))
    roles, _ = plain_roles(last_tokens, algorithm.estimator.needs_critic, algorithm.wants_reference, ranks, rate)
    settings = made_settings(
        PpoSettings, total_rollouts=3, prompts_per_batch=4 // world_size, generation_batches=1,
        sequences_per_minibatch=ppo.sequences_per_minibatch, ppo_epochs=1, critic_warmup=0,
        dynamic_sampling_tries=tries, eval_interval=0, seed=7, sampling=Sampling(4, 0.9, 0, 1.0, 0, 1),
        experience=experience_settings(algorithm, ppo, SequenceLayout(PlanSettings(1), 1)),
        learning=learning_settings(algorithm, ppo), evaluates_first=True,
    )  # fmt: skip
    settings = changed_settings(settings, **(changed or {}))
    return PpoTrainer(roles, engine, PromptSource(PROMPTS, 7), Updates(roles, settings), None, settings, None)


def two_rollouts(trainer: PpoTrainer, **fields) -> list[Experience]:
    """Two experiences of eight sequences, some of their fields filled with a value: two minibatches."""
    found = []
    for iteration in (1, 2):
        prompts, seeds = trainer.next_prompts(iteration, 0)
        made = trainer.experience_of(trainer.score(prompts, trainer.roll_out(prompts, seeds)), iteration)
        changes = {name: torch.full_like(getattr(made, name), value) for name, value in fields.items()}
        found.append(dataclasses.replace(made, **changes))
    return found


def events_of(trainer: PpoTrainer) -> list[str]:
    return trainer.roles.actor._events


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


def test_the_greedy_baseline_is_one_response_a_prompt():
    engine = Engine()
    trainer = made_trainer(engine, advantage="remax")
    prompts, seeds = trainer.next_prompts(1, 0)
    made = trainer.experience_of(trainer.score(prompts, trainer.roll_out(prompts, seeds)), 1)
    assert engine.calls[1].prompts == engine.calls[0].prompts[::2] and engine.calls[1].temperature == 0.0
    assert {"1_prompts", "2_rollout", "3_score"} <= trainer.clock.read().keys()
    assert trainer.settings.experience.estimator is ESTIMATORS["remax"] and made.scored.scores_B.tolist() == [6.0] * 8
    kl_BR = made.old_logprobs_BR - made.read.ref_logprobs_BR
    torch.testing.assert_close(made.rewards_BR, 6.0 - 0.1 * kl_BR)
    assert torch.equal(made.advantages_BR, made.rewards_BR - 5.0) and kl_BR.abs().min() > 0.0


def odd_prompts_differ(prompt: int, sample: int) -> int:
    return 6 + sample if prompt % 2 else 6


def replaced(world_size: int) -> list[list[int]]:
    """Each rank's prompts after one try to replace those that score alike (the even ones)."""
    found = []
    for rank in range(world_size):
        trainer = made_trainer(Engine(odd_prompts_differ), rank, world_size, tries=1, advantage="grpo")
        prompts, seeds = trainer.next_prompts(2, 0)
        samples = trainer.score(prompts, trainer.roll_out(prompts, seeds))
        samples = trainer.replace_equal_groups(samples, 2, 0).samples
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
    experiences = two_rollouts(trainer)[:1]
    trainer.steer_kl({"rollout/kl": 1.1}, experiences)
    assert trainer.kl_control.kl_coef == pytest.approx(0.1 * (1 + 0.1 * 8 / 100))
    fixed = made_trainer(Engine())
    fixed.steer_kl({"rollout/kl": 9.0}, experiences)
    assert fixed.kl_control.kl_coef == 0.1
    made_trainer(Engine(), kl_coef=0.0).steer_kl({}, experiences)  # without a reference there is no such figure


def test_a_minibatch_of_which_nothing_counts_takes_no_step():
    trainer = made_trainer(Engine(), advantage="rloo")
    figures = trainer.learn(two_rollouts(trainer, counts_B=False), 1, PROMPTS[:8])
    assert figures == {"train/minibatches": 0.0, "train/empty_minibatches": 2.0} and events_of(trainer) == []
    figures = trainer.learn(two_rollouts(trainer), 1, PROMPTS[:8])
    assert events_of(trainer) == ["step"] * 2
    assert (figures["train/minibatches"], figures["train/empty_minibatches"]) == (2.0, 0.0)
    assert figures["actor/skipped"] == 0.0


def test_row_ids_of_all_ranks_follow_their_sequences(monkeypatch):
    """Prompts are dealt to ranks one by one: the first of each rank, then the second of each."""
    monkeypatch.setattr("training.step3_ppo.learning.notes.gathered", lambda own: [own, [row + 100 for row in own]])
    assert row_ids_of_all_ranks(PROMPTS[7:9], 2) == [7, 7, 107, 107, 8, 8, 108, 108]


def test_a_skipped_step_is_counted(capsys):
    trainer = made_trainer(Engine(), advantage="rloo")
    figures = trainer.learn(two_rollouts(trainer, advantages_BR=float("nan")), 1, PROMPTS[:8])
    assert events_of(trainer) == ["step", "step"] and figures["actor/skipped"] == 1.0
    assert "2 of at most 10 (--max_bad_steps)" in capsys.readouterr().out


def test_the_first_rollouts_train_the_critic_alone():
    trainer = made_trainer(Engine(), advantage="gae", changed={"critic_warmup": 2})
    experiences = two_rollouts(trainer)[:1]
    taken = []
    for iteration in (1, 2, 3):
        trainer.learn(experiences, iteration)
        taken.append((trainer.roles.actor.steps, trainer.roles.critic.steps))
    assert taken == [(0, 1), (0, 2), (1, 3)]


def test_the_trainers_own_state_comes_back():
    trainer, other = (made_trainer(Engine(), kl_control="adaptive") for _ in range(2))
    trainer.kl_control.update(100.0, 64)
    state = json.loads(json.dumps(trainer.state_dict()))
    assert state["kl_control"]["coefficient"] != other.kl_control.kl_coef
    other.load_state_dict(state)
    assert other.state_dict() == state
    other.load_state_dict({**state, "texts_taken": 0})  # of an earlier version, without texts


def test_each_rank_has_its_engines_state_back():
    """On another number of ranks any of them."""

    class Counting(Engine):
        state = None

        def load_state_dict(self, state) -> None:
            self.state = state

    saved = made_trainer(Engine()).state_dict()
    for rank, ranks, found, wanted in ((1, 2, [{"n": 3}, {"n": 4}], 4), (3, 4, [{"n": 3}], 3)):
        engine = Counting()
        made_trainer(engine, rank, ranks).load_state_dict({**saved, "rollout_engine": found})
        assert engine.state == {"n": wanted}


def test_updates_end_where_their_kl_is_too_large():
    """Two epochs of two minibatches, which make the drawn tokens less likely. The first has the policy that rolled out;
    from the second on the policy is another."""

    def learned(stop_update_kl: float | None) -> dict[str, float]:
        changed = {"ppo_epochs": 2, "stop_update_kl": stop_update_kl}
        trainer = made_trainer(Engine(), advantage="rloo", kl_coef=0.0, rate=0.03, changed=changed)
        return trainer.learn(two_rollouts(trainer, advantages_BR=-1.0), 1)

    bound = 1e-3
    figures = learned(bound)
    assert (figures["train/minibatches"], figures["train/empty_minibatches"]) == (2.0, 0.0)
    assert bound / 2 < figures["actor/update_kl"] < learned(None)["actor/update_kl"]
    assert learned(None)["train/minibatches"] == 4.0


def test_what_updates_are_worth_in_flops():
    """One prompt token and two response tokens a sequence, 48 in all: however many epochs there are, each minibatch
    counts its part."""
    counted = []
    meter = SimpleNamespace(flops=lambda documents, targets: counted.append((documents, targets)) or 10.0)
    changed = {"meters": (meter, meter), "ppo_epochs": 3, "critic_warmup": 1}
    trainer = made_trainer(Engine(length=2), advantage="gae", changed=changed)
    experiences = two_rollouts(trainer)
    assert trainer.learn(experiences, 2)["learn/flops"] == 3 * (10.0 + 10.0)  # three epochs of actor and critic
    assert counted[0][1] == 32 and sum(document.tokens for document in counted[0][0]) == 48
    assert trainer.learn(experiences, 1)["learn/flops"] == 3 * 10.0  # the critic alone


def test_the_kl_ends_the_training():
    assert not made_trainer(Engine()).kl_is_over({"rollout/kl": 1e9})
    trainer = made_trainer(Engine(), changed={"stop_kl": 2.0})
    assert trainer.kl_is_over({"rollout/kl": 2.1}) and not trainer.kl_is_over({"rollout/kl": 2.0})
    assert not trainer.kl_is_over({})  # a run that begins
