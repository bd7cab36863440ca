"""AdamW by hand and beside torch's, clipping, and schedules beside transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.audit.references.adamw import AdamW, clip_factor, norm, share_of_peak

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


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_schedules_are_those_of_transformers(shape):
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    name = "constant_with_warmup" if shape == "constant" else shape
    scheduler = get_scheduler(name, optimizer, 3, 10)
    for step in range(10):
        assert share_of_peak(shape, step, 3, 10) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()
