"""A client's optimizer beside torch's AdamW with torch's clipping."""

from __future__ import annotations

import pytest
import torch

from threestep.plugins.tinker.client_state import ClientState
from threestep.plugins.tinker.records import AdamOrder, WrongRequest


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
    with pytest.raises(WrongRequest, match="the gradient has the norm nan, so that no step is taken and the gradient"):
        state.step(AdamOrder())
    assert state.weights_P.tolist() == [1.0] * 3 and state.gradient_P is None and state.steps == 0
