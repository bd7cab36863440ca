"""AdamW by hand and beside torch's, clipping, and schedules beside transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from threestep.plugins.audit.references.adamw import AdamW, RateShape, clip_factor, norm, share_of_peak

pytestmark = pytest.mark.unit


def test_a_first_update_by_hand():
    rule = AdamW(rate=0.1, beta1=0.9, beta2=0.999, epsilon=0.0, decay=0.0, updates_before=0)
    zero, one = np.zeros(1), np.ones(1)
    assert rule.after(one, one, zero, zero) == pytest.approx([0.9])


def test_updates_are_torchs_in_float64():
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    first = second = np.zeros(2)
    for update, gradient in enumerate(([0.5, -1.0], [-0.25, 4.0], [0.0, 1.0])):
        before, given = weight.detach().numpy().copy(), np.array(gradient)
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        found = AdamW(0.01, 0.8, 0.95, 1e-6, 0.1, updates_before=update).after(before, given, first, second)
        assert found == pytest.approx(weight.detach().numpy(), abs=1e-15)
        first, second = 0.8 * first + 0.2 * given, 0.95 * second + 0.05 * given**2


def test_the_norm_and_clipping():
    assert norm([np.array([[3.0]]), np.array([4.0])]) == 5.0
    assert [clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(4.0, 0.0)] == [0.25, 1.0, 1.0]


SHAPES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt")


@pytest.mark.parametrize("name", SHAPES)
def test_schedules_are_those_of_transformers(name):
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(theirs, optimizer, 3, 10)
    for step in range(10):
        found = share_of_peak(name, step, RateShape(3, 10))
        # Their polynomial ends at 1e-7.
        assert found == pytest.approx(scheduler.get_last_lr()[0], abs=2e-7 if name == "polynomial" else 1e-12)
        optimizer.step()
        scheduler.step()


def test_floors_and_the_stable_part():
    """wsd over 10 steps, half of them stable: 1 at step 4, half a cosine from 5 on, 0.2 + 0.8 / 2 in its middle."""
    shape = RateShape(0, 10, least=0.2, stable=0.5)
    assert share_of_peak("wsd", 4, shape) == 1.0 and share_of_peak("wsd", 7.5, shape) == pytest.approx(0.6)
    assert share_of_peak("linear", 1, RateShape(2, 10, init=0.5)) == 0.75
