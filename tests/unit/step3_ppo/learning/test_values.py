"""The critic that learns as it reads takes the step of one that reads first and learns afterwards."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.unit.step3_ppo.test_trainer import Engine, made_trainer
from training.step3_ppo.contracts.records import Experience

LENGTH = 3


def one_step(at_once: bool, ended=lambda rollout: rollout.ended_B, warmup: int = 0, **flags):
    """Return the experience, the figures and the critic's weights after a step. ended: of the responses."""
    engine = Engine(lambda prompt, sample: 6 + (prompt + sample) % 5, LENGTH)
    changed = {"learns_values": at_once, "critic_warmup": warmup}
    trainer = made_trainer(engine, advantage="gae", changed=changed, rate=0.1, **flags)
    prompts, seeds = trainer.next_prompts(1, 0)
    rollout = trainer.roll_out(prompts, seeds)
    rollout = dataclasses.replace(rollout, ended_B=ended(rollout))
    made = trainer.experience_of(trainer.score(prompts, rollout), 1)
    figures = trainer.learn([made], 1)
    return made, figures, [*trainer.roles.critic.module.parameters()]


def some(rollout):
    return torch.arange(len(rollout.ended_B)) % 3 > 0


@pytest.mark.parametrize(
    ("flags", "ended"),
    [
        ({}, some),
        ({"mask_truncated_responses": True}, some),
        ({"gamma": 0.9, "lam": 0.5}, some),
        ({"warmup": 1}, some),
    ],
)
def test_the_same_values_returns_and_weights(flags, ended):
    (apart, figures, weights), (once, figures_once, weights_once) = (
        one_step(at_once, ended, **flags) for at_once in (False, True)
    )
    assert apart.reused.values is None and once.reused.values is not None
    for name in ("advantages_BR", "returns_BR"):
        torch.testing.assert_close(getattr(once, name), getattr(apart, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(once.read.values_BR, apart.read.values_BR, rtol=1e-5, atol=1e-6)
    assert figures_once["critic/value_loss"] == pytest.approx(figures["critic/value_loss"], rel=1e-5) != 0.0
    assert figures_once["critic/clip_fraction"] == figures["critic/clip_fraction"] == 0.0
    start = list(made_trainer(Engine(), advantage="gae").roles.critic.module.parameters())
    assert any(not torch.equal(weight, first) for weight, first in zip(weights, start, strict=True))
    for once_weight, weight in zip(weights_once, weights, strict=True):
        torch.testing.assert_close(once_weight, weight, rtol=1e-5, atol=1e-6)


def test_where_nothing_counts_values_are_read_and_nothing_is_learned():
    made, figures, weights = one_step(
        True, lambda rollout: torch.zeros_like(rollout.ended_B), mask_truncated_responses=True
    )
    start = made_trainer(Engine(), advantage="gae").roles.critic.module.parameters()
    assert isinstance(made, Experience) and bool(made.read.values_BR.any())
    assert figures["train/empty_minibatches"] == 1.0 and "critic/value_loss" not in figures
    for weight, first in zip(weights, start, strict=True):
        assert torch.equal(weight, first) and weight.grad is None


def test_a_critic_that_does_not_learn_as_it_reads_has_no_learner():
    assert made_trainer(Engine(), advantage="gae").updates.value_learner(1) is None
    assert made_trainer(Engine(), advantage="grpo", changed={"learns_values": True}).updates.value_learner(1) is None
