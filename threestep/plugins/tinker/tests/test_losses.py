"""Losses of the Tinker API beside sums written from their papers, a target at a time."""

from __future__ import annotations

import math

import pytest
import torch

from threestep.plugins.tinker.losses import HIGH, LOSSES, LOW


def numbers(name):
    dice = torch.Generator().manual_seed(3)
    shape = (2, 5, 2)
    logprobs = (-torch.rand(shape, generator=dice, dtype=torch.float64) * 3).requires_grad_()
    inputs = {
        "weights": torch.rand(shape, generator=dice, dtype=torch.float64),
        "logprobs": -torch.rand(shape, generator=dice, dtype=torch.float64) * 3,
        "advantages": torch.randn(shape, generator=dice, dtype=torch.float64),
    }
    return logprobs, {key: inputs[key] for key in LOSSES[name].needs}


def of_one(name, p, own, config):
    """The loss of one target and its derivative by p."""
    if name == "cross_entropy":
        return -own["weights"] * p, -own["weights"]
    q, advantage = own["logprobs"], own["advantages"]
    ratio = math.exp(p - q)
    if name == "importance_sampling":
        return -ratio * advantage, -ratio * advantage
    if name == "dro":
        return -(p * advantage - config["beta"] / 2 * (p - q) ** 2), -(advantage - config["beta"] * (p - q))
    low, high = own.get(LOW, config[LOW]), own.get(HIGH, config[HIGH])
    clipped = min(max(ratio, low), high)
    if name == "cispo":
        return -clipped * advantage * p, -clipped * advantage
    first, second = ratio * advantage, clipped * advantage
    moves = first <= second if first != second else True
    return -min(first, second), -first if moves else 0.0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("has_own_bounds", [False, True])
def test_each_target_has_the_loss_and_the_gradient_of_its_formula(name, has_own_bounds):
    logprobs, inputs = numbers(name)
    config = {key: value * 1.1 for key, value in LOSSES[name].config.items()}
    if has_own_bounds and not LOSSES[name].takes:
        pytest.skip("it has no bounds")
    if has_own_bounds:
        inputs = {**inputs, LOW: torch.full_like(logprobs, 0.6), HIGH: torch.full_like(logprobs, 1.05)}
    losses = LOSSES[name].of_targets(logprobs, inputs, config)
    losses.sum().backward()
    losses = losses.detach()
    for place, p in enumerate(logprobs.flatten().tolist()):
        own = {key: float(value.flatten()[place]) for key, value in inputs.items()}
        loss, slope = of_one(name, p, own, config)
        assert float(losses.flatten()[place]) == pytest.approx(loss, rel=1e-12)
        assert float(logprobs.grad.flatten()[place]) == pytest.approx(slope, rel=1e-12, abs=1e-15)
