"""Losses of the Tinker API, for each target: sums of these are what a client's gradient is of.

With p the log-probability of a target, q that of the policy that drew it, A its advantage, r = exp(p - q):

    cross_entropy         -w p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r, low, high) A)                    Schulman et al. 2017, arXiv:1707.06347
    cispo                 -clip(r, low, high) A p, no gradient by the factor  MiniMax 2025, arXiv:2506.13585
    dro                   -(p A - beta / 2 (p - q)^2)                         Richemond et al. 2024, arXiv:2405.19107

low and high are bounds of r itself. Shapes are those of `logprobs`, whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]

WEIGHTS, DRAWN, ADVANTAGES, LOW, HIGH = "weights", "logprobs", "advantages", "clip_low_threshold", "clip_high_threshold"
_CLIP = {LOW: 0.8, HIGH: 1.2}


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -logprobs * inputs[WEIGHTS]


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -_ratio(logprobs, inputs) * inputs[ADVANTAGES]


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratio = _ratio(logprobs, inputs)
    advantages = inputs[ADVANTAGES]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, config) * advantages)


def cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    factor = _clipped(_ratio(logprobs, inputs).detach(), inputs, config)
    return -factor * inputs[ADVANTAGES] * logprobs


def dro(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -(logprobs * inputs[ADVANTAGES] - 0.5 * config["beta"] * (logprobs - inputs[DRAWN]).square())


def _ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return (logprobs - inputs[DRAWN]).exp()


def _clipped(ratio: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Bounds of single targets, where a datum has them, come before those of the request."""
    if LOW not in inputs and HIGH not in inputs:
        return ratio.clamp(config[LOW], config[HIGH])
    low = inputs.get(LOW, torch.full_like(ratio, config[LOW]))
    return torch.minimum(torch.maximum(ratio, low), inputs.get(HIGH, torch.full_like(ratio, config[HIGH])))


class TargetLoss(NamedTuple):
    """of_targets: see above. needs, takes: names of a datum's inputs. config: its defaults."""

    of_targets: Callable[[torch.Tensor, Inputs, Config], torch.Tensor]
    needs: tuple[str, ...]
    config: Config = {}
    takes: tuple[str, ...] = ()


LOSSES = {
    "cross_entropy": TargetLoss(cross_entropy, (WEIGHTS,)),
    "importance_sampling": TargetLoss(importance_sampling, (DRAWN, ADVANTAGES)),
    "ppo": TargetLoss(ppo, (DRAWN, ADVANTAGES), _CLIP, (LOW, HIGH)),
    "cispo": TargetLoss(cispo, (DRAWN, ADVANTAGES), _CLIP, (LOW, HIGH)),
    "dro": TargetLoss(dro, (DRAWN, ADVANTAGES), {"beta": 0.05}),
}
