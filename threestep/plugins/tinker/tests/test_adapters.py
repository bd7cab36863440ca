"""Adapters as a vector, a client's optimizer beside torch's AdamW, and losses beside sums from their papers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.tinker.adapters import AdaptedLayer, AdaptedModel, AdapterLayout, RowShares
from threestep.plugins.tinker.client_state import ClientState
from threestep.plugins.tinker.losses import HIGH, LOSSES, LOW
from threestep.plugins.tinker.records import AdamOrder, LoraSpec, WrongRequest
from training.utils.base.errors import ThreestepError

LAYOUT = AdapterLayout(2, (AdaptedLayer("a", "mlp", 3, 4), AdaptedLayer("b", "head", 5, 2)))


def test_pieces_follow_one_another():
    stack = torch.arange(2 * sum(LAYOUT.sizes)).view(2, -1)
    parts = [part for pair in LAYOUT.pieces(stack).values() for part in pair]
    assert [tuple(part.shape) for part in parts] == [(2, 2, 3), (2, 4, 2), (2, 2, 5), (2, 2, 2)]
    assert torch.cat([part.flatten(1) for part in parts], dim=1).equal(stack)


def test_first_weights_are_of_the_seed_and_add_nothing():
    first = LAYOUT.new(5, torch.float32)
    assert first.equal(LAYOUT.new(5, torch.float32)) and not first.equal(LAYOUT.new(6, torch.float32))
    for down, up in LAYOUT.pieces(first.unsqueeze(0)).values():
        assert not up.any() and float(down.abs().max()) <= down.shape[-1] ** -0.5 and down.all()


@pytest.mark.parametrize(
    ("clients", "take", "put"),
    [([0, 0, 1, 1], None, None), ([0, 1, 1], [0, 0, 1, 2], [0, 2, 3]), ([1, 0], [1, 0], [1, 0]), ([0], None, None)],
)
def test_rows_are_dealt_to_their_clients(clients, take, put):
    shares = RowShares.of(clients, torch.device("cpu"))
    assert [None if part is None else part.tolist() for part in (shares.take, shares.put)] == [take, put]


def test_a_client_trains_something():
    with pytest.raises(
        ThreestepError,
        match="no layers to put adapters on: this model has linear layers in .*, but the request selects none;",
    ):
        AdaptedModel(tiny_causal_lm("llama")).layout(LoraSpec(2, 0, ()))


@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_steps_are_those_of_adamw(clip):
    dice = torch.Generator().manual_seed(1)
    first = torch.randn(30, generator=dice, dtype=torch.float64)
    theirs = torch.nn.Parameter(first.clone())
    adam = torch.optim.AdamW([theirs], lr=0.03, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    state = ClientState.new(first)
    for step in range(6):
        halves = [torch.randn(30, generator=dice, dtype=torch.float64) for _ in range(2)]
        for half in halves:
            state.add(half)
        theirs.grad = sum(halves)
        norm = torch.nn.utils.clip_grad_norm_([theirs], clip or float("inf"))
        adam.param_groups[0]["lr"] = 0.03 / (step + 1)
        adam.step()
        figures = state.step(AdamOrder(0.03 / (step + 1), 0.8, 0.9, 1e-6, 0.2, clip))
        assert figures["grad_norm"] == pytest.approx(float(norm), rel=1e-12)
        assert state.gradient_P is None
        torch.testing.assert_close(state.weights_P, theirs.detach(), rtol=1e-12, atol=1e-14)


def test_weights_that_a_sampler_holds_do_not_move():
    state = ClientState.new(torch.ones(3))
    held = state.weights_P
    state.add(torch.ones(3))
    state.step(AdamOrder(0.1))
    assert held.tolist() == [1.0] * 3 and state.weights_P.tolist() != held.tolist()


def test_a_gradient_that_is_not_finite_is_dropped():
    state = ClientState.new(torch.ones(3))
    state.add(torch.tensor([1.0, float("nan"), 1.0]))
    with pytest.raises(WrongRequest, match="the gradient's norm is nan, so no step was taken and the gradient"):
        state.step(AdamOrder())
    assert state.weights_P.tolist() == [1.0] * 3 and state.gradient_P is None and state.steps == 0


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
