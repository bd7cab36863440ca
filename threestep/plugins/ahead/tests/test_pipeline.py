"""Rollouts that are drawn ahead: by the weights of step s - 1 - K exactly, whatever the timing, and learned from as
decoupled PPO does. A tiny real model draws and trains; the reference is plain float64 PyTorch with its own weights."""

from __future__ import annotations

import copy
import json
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plain_roles import plain_roles
from tests.support.step3_records import changed as changed_settings
from tests.support.step3_records import made as made_settings
from threestep.plugins.ahead.arguments import AheadArguments
from threestep.plugins.ahead.scheduler import AheadScheduler
from threestep.plugins.mismatch.arguments import MismatchArguments
from threestep.plugins.mismatch.correction import MismatchCorrection
from training.step3_ppo.contracts.rollouts import PromptSource, RolloutEvents
from training.step3_ppo.contracts.settings import PpoSettings
from training.step3_ppo.flags.algorithm import experience_settings, learning_settings, selected_algorithm
from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
from training.step3_ppo.learning.learning import Updates
from training.step3_ppo.trainer import PpoTrainer
from training.utils.base.errors import Mistakes
from training.utils.contracts.rollout_engine import Sampling, ServerShare
from training.utils.contracts.rows import PromptRow
from training.utils.engine.ranks.startup import Ranks
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout
from training.utils.run.run_folder import RunLog, read_rollouts

PROMPTS = [
    PromptRow(row, np.array([10 + row, 3 + row % 5], dtype=np.int32), f"prompt {row}", None) for row in range(20)
]
STEPS, SAMPLES, RATE, MOST, CLIP, THRESHOLD = 5, 2, 0.003, 3, 0.2, 2.0


class LateRollout(TransformersRollout):
    """Its rollouts take a time that no seed decides."""

    def roll_out(self, model, request):
        time.sleep(random.SystemRandom().uniform(0.0, 0.02))
        return super().roll_out(model, request)


class ServedRollout(TransformersRollout):
    """Its rollouts are drawn by one server, in as many seconds as there were before, and one."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.own = 0, threading.local()

    def roll_out(self, model, request):
        self.count += 1
        self.own.shares = {**getattr(self.own, "shares", {}), "http://a:1": ServerShare(1, self.count, self.count)}
        return super().roll_out(model, request)

    def shares(self):
        found, self.own.shares = getattr(self.own, "shares", {}), {}
        return found


class FailingRollout(TransformersRollout):
    def roll_out(self, model, request):
        raise ValueError("no responses today")


def last_tokens(rows) -> torch.Tensor:
    return rows.input_ids_NT.flatten()[rows.end_B].float() / 10


def made_trainer(
    ahead: int | AheadArguments,
    engine: Any = None,
    *,
    rank: int = 0,
    ranks: int = 1,
    total: int = STEPS,
    mismatch_correction: str | None = None,
    **drawing: Any,
) -> PpoTrainer:
    """GRPO on two samples of four prompts in all, two passes over them in one minibatch each. drawing: of
    DrawingSettings."""
    ppo = PpoArguments(
        num_samples_per_prompt=SAMPLES, per_device_generation_batch_size=4 // ranks, clip_reward=100.0,
        per_device_training_batch_size=8 // ranks, ppo_epochs=2, max_answer_seq_len=MOST,
    )  # fmt: skip
    flags = AlgorithmArguments(advantage="grpo", kl_coef=0.0)
    own = ahead if isinstance(ahead, AheadArguments) else AheadArguments(rollouts_ahead=str(ahead))
    scheduler = AheadScheduler(own, ppo) if own.steps_ahead else None
    mismatch = MismatchArguments(mismatch_correction=mismatch_correction)
    correction = MismatchCorrection(mismatch.chosen(is_exact=scheduler is None))
    algorithm = selected_algorithm(flags, ppo, Mistakes(), correction=correction)
    assert algorithm is not None
    roles, _ = plain_roles(last_tokens, False, False, Ranks(rank, rank, ranks, torch.device("cpu")), RATE)
    settings = made_settings(
        PpoSettings, total_rollouts=total, prompts_per_batch=4 // ranks, generation_batches=1,
        sequences_per_minibatch=ppo.sequences_per_minibatch, ppo_epochs=2, critic_warmup=0,
        dynamic_sampling_tries=0, eval_interval=0, seed=7, sampling=Sampling(MOST, 1.0, 0, 1.0, 0, 1),
        experience=experience_settings(algorithm, ppo, SequenceLayout(PlanSettings(1), 1)),
        learning=learning_settings(algorithm, ppo), evaluates_first=False, **drawing,
    )  # fmt: skip
    settings = changed_settings(settings)
    engine = engine or TransformersRollout()
    source, updates = PromptSource(PROMPTS, 7), Updates(roles, settings)
    return PpoTrainer(roles, engine, source, updates, None, settings, None, scheduler=scheduler)


def trained(trainer: PpoTrainer, steps: range) -> list[Any]:
    """Take these steps; return each one's rollout."""
    found = []
    for step in steps:
        for prompts, rollout in trainer.rollouts(step):
            trainer.learn([trainer.experience_of(trainer.score(prompts, rollout), step)], step, prompts.rows)
            found.append(rollout)
    return found


def weights(trainer: PpoTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.roles.actor_model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logprobs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(response)), torch.tensor(response)]


def decoupled_loss(now: torch.Tensor, proximal: torch.Tensor, behaviour: torch.Tensor, gain: float) -> torch.Tensor:
    """- pi_prox / pi_behav min(r A, clip(r) A), r = pi / pi_prox (Hilton et al. 2022, equation 3), the first ratio
    truncated (AReaL), of each token."""
    weight = (proximal - behaviour).exp().clamp(max=THRESHOLD)
    ratio = (now - proximal).exp()
    return -weight * torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)


def plain_run(start: Any, rollouts: list[Any], ahead: int) -> tuple[list[Any], float]:
    """Train in float64 on the same responses; return every step's model, and how far the log-probabilities that were
    recorded are from those of the weights of step s - 1 - K."""
    models, apart = [copy.deepcopy(start).double()], 0.0
    for step, rollout in enumerate(rollouts, start=1):
        behaviour_model = models[max(step - 1 - ahead, 0)]
        pairs = [
            (rollout.prompt_of(row).tolist(), rollout.response_of(row).tolist()) for row in range(len(rollout.ended_B))
        ]
        with torch.no_grad():
            proximal = [logprobs(models[-1], *pair) for pair in pairs]
            behaviour = [logprobs(behaviour_model, *pair) for pair in pairs]
        for row, own in enumerate(behaviour):
            apart = max(apart, float((own - rollout.sampled_logprobs_BR[row, : len(own)]).abs().max()))
        scores = torch.tensor([response[-1] / 10 for _, response in pairs], dtype=torch.float64).view(-1, SAMPLES)
        gains = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)).flatten().tolist()
        model = copy.deepcopy(models[-1])
        for _ in range(2):
            losses = [
                decoupled_loss(logprobs(model, *pair), prox, behav, gain)
                for pair, prox, behav, gain in zip(pairs, proximal, behaviour, gains, strict=True)
            ]
            model.zero_grad()
            torch.cat(losses).mean().backward()
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.grad is not None:
                        weight -= RATE * weight.grad
        models.append(model)
    return models, apart


def test_the_decoupled_loss_of_two_tokens_by_hand():
    """p_behav, p_prox, p of a token, A = 1: (1/2, 1/4, 3/10) has weight 1/2 and ratio 6/5, which the clip leaves:
    -0.6. (1/5, 1/2, 7/10) has weight 5/2, truncated to 2, and ratio 7/5, clipped to 6/5: -2.4. With A = -1 the second
    is not clipped: 2 x 7/5 = 2.8."""
    behaviour, proximal, now = (torch.tensor(row).log() for row in ([0.5, 0.2], [0.25, 0.5], [0.3, 0.7]))
    assert decoupled_loss(now, proximal, behaviour, 1.0).tolist() == pytest.approx([-0.6, -2.4])
    assert decoupled_loss(now, proximal, behaviour, -1.0).tolist() == pytest.approx([0.6, 2.8])


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_run_is_that_of_decoupled_ppo_in_plain_float64(ahead):
    trainer = made_trainer(ahead, LateRollout(), mismatch_correction="truncate")
    start = copy.deepcopy(trainer.roles.actor_model)
    rollouts = trained(trainer, range(1, STEPS + 1))
    models, apart = plain_run(start, rollouts, ahead)
    assert apart < 5e-4  # of the weights of step s - 1 - K, and of no others
    if ahead == 2:
        assert plain_run(start, rollouts, 1)[1] > 0.02
    first, last = (dict(models[place].named_parameters()) for place in (0, -1))
    moved = max(float((last[name] - first[name]).detach().abs().max()) for name in last)
    for name, weight in weights(trainer).items():
        torch.testing.assert_close(weight.double(), last[name].detach(), rtol=0, atol=0.01 * moved)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_log_has_what_servers_drew_of_each_step_and_of_no_evaluation(tmp_path, ahead):
    trainer = made_trainer(ahead, ServedRollout())
    trainer.events = RolloutEvents(RunLog(tmp_path / "rollouts.jsonl"), "vllm_server", len(PROMPTS), 4)
    for step in range(1, STEPS + 1):
        trainer.rollout_engine.own.shares = {"http://b:1": ServerShare(9, 9.0, 9.0)}
        trained(trainer, range(step, step + 1))
        trainer.note_drawn(step)
    assert [line["servers"] for line in read_rollouts(tmp_path)] == [
        {"http://a:1": {"responses": 1, "seconds": step, "slowest": step}} for step in range(1, STEPS + 1)
    ]


def test_ages_grow_to_the_flags_and_the_last_steps_begin_no_more():
    trainer = made_trainer(2)
    ages, pending = [], []
    for step in range(1, STEPS + 1):
        trained(trainer, range(step, step + 1))
        ages.append(trainer.queue.figures()["rollout/age"])
        pending.append(trainer.queue.pending())
    assert ages == [0.0, 1.0, 2.0, 2.0, 2.0]
    assert pending == [[(2, 0), (3, 0)], [(3, 0), (4, 1)], [(4, 1), (5, 2)], [(5, 2)], []]


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_resumed_run_goes_on_with_the_rollouts_that_were_drawn(ahead):
    whole, first = made_trainer(ahead), made_trainer(ahead)
    trained(whole, range(1, STEPS + 1))
    trained(first, range(1, 4))
    saved = json.loads(json.dumps(first.state_dict()))
    assert [(each["step"], each["version"]) for each in saved["rollouts_ahead"]] == first.queue.pending()
    second = made_trainer(ahead)
    second.roles.actor_model.load_state_dict(first.roles.actor_model.state_dict())
    second.load_state_dict(saved)
    trained(second, range(4, STEPS + 1))
    assert same(weights(second), weights(whole))


def test_a_run_that_is_shorter_when_it_resumes_leaves_rollouts_out():
    first, second = made_trainer(2), made_trainer(2, total=4)
    trained(first, range(1, 4))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.queue.pending() == [(4, 1)]


def test_other_numbers_of_ranks_deal_what_was_drawn_anew(monkeypatch):
    """Two ranks saved; one, two and four go on, each with the responses to its own prompts."""
    pairs = [made_trainer(1, rank=rank, ranks=2) for rank in range(2)]
    for trainer in pairs:
        trainer.queue.take(1)
    parts = [trainer.state_dict()["rollouts_ahead"][0] for trainer in pairs]
    saved = [{**parts[0], "rollouts_of_ranks": [own["rollouts_of_ranks"][0] for own in parts]}]
    whole = made_trainer(1)
    whole.queue.take(1)
    drawn = whole.queue.take(2).rollouts[0]
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            trainer = made_trainer(1, rank=rank, ranks=ranks)
            trainer.queue.load_state_dict(saved)
            own = trainer.queue.take(2)
            places = [place * SAMPLES + sample for place in range(rank, 4, ranks) for sample in range(SAMPLES)]
            assert [row.row_id for row in own.prompts[0].rows] == [
                row.row_id for row in whole.next_prompts(2, 0)[0].rows[rank::ranks]
            ]
            for index, place in enumerate(places):
                assert torch.equal(own.rollouts[0].response_of(index), drawn.response_of(place))
                assert torch.equal(own.rollouts[0].prompt_of(index), drawn.prompt_of(place))


def test_what_drawing_raises_ends_the_loop():
    trainer = made_trainer(1, FailingRollout())
    with pytest.raises(ValueError, match="no responses today"):
        next(iter(trainer.rollouts(1)))
