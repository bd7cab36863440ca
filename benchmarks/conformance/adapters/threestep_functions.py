"""Threestep's functions of step 3, as pure tensors."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from benchmarks.conformance.adapters.threestep import versions as versions  # noqa: PLC0414 - part of this adapter

LACKS: dict[str, str] = {}


def _estimated(name: str, rewards_PG: torch.Tensor) -> torch.Tensor:
    from importlib import import_module

    from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings

    count = rewards_PG.numel()
    groups = torch.arange(len(rewards_PG)).repeat_interleave(rewards_PG.shape[1])
    inputs = AdvantageInputs(rewards_PG.reshape(count, 1), torch.ones(count, dtype=torch.long), groups)
    estimator = getattr(import_module("training.step3_ppo.advantages.estimators"), name)
    return estimator(inputs, AdvantageSettings(gamma=1.0, lam=1.0, norm_by_std=True))[0].view_as(rewards_PG)


def group_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    return _estimated("grpo", rewards_PG)


def rloo(rewards_PG: torch.Tensor) -> torch.Tensor:
    return _estimated("rloo", rewards_PG)


def gae_returns(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    from training.step3_ppo.advantages.estimators import gae
    from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings

    inputs = AdvantageInputs(rewards, mask.sum(1), torch.arange(len(rewards)), values)
    return gae(inputs, AdvantageSettings(gamma=gamma, lam=lam, norm_by_std=True))[1]


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    from training.step3_ppo.advantages.estimators import moments
    from training.step3_ppo.advantages.estimators import whiten as whitened

    return whitened(values, mask, moments(values, mask))


def kl(name: str, logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    from training.step3_ppo.kl import estimators

    return getattr(estimators, name)(logprobs, ref)


def policy_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, tokens: float | None
) -> torch.Tensor:
    """Of one micro-batch; its totals are always those of the whole batch."""
    from training.step3_ppo.losses.losses import StepTotals, ppo, token_mean

    taken = SimpleNamespace(log_ratio_M=(logprobs - old)[mask], advantages_M=advantages.expand_as(old)[mask])
    losses, _ = ppo(taken, SimpleNamespace(clip_low=0.2, clip_high=0.2, dual_clip=None))
    counted = torch.ones_like(losses)
    sequence = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    weights = token_mean(counted, sequence, StepTotals(tokens or float(mask.sum()), len(mask), mask.shape[1]))
    return (losses * weights).sum()


always_whole = True  # a loss without the totals of its step cannot be written here
functions = SimpleNamespace(
    **{name: value for name, value in globals().items() if callable(value) or name == "always_whole"}
)
