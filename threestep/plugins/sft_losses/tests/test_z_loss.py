"""The z-loss by hand."""

from __future__ import annotations

import math

import pytest
import torch

from threestep.plugins.sft_losses.z_loss import z_loss

pytestmark = pytest.mark.unit


def test_z_loss_by_hand():
    # Logits (0, 0) and (ln 3, ln 5) have Z = 2 and Z = 8: log^2 Z = ln^2 2 and (3 ln 2)^2, of a step with 5 targets.
    logits_MV = torch.tensor([[0.0, 0.0], [math.log(3), math.log(5)]])
    log_normalizers_M = logits_MV.logsumexp(-1).requires_grad_()
    loss = z_loss(log_normalizers_M, tokens_in_step=5)
    assert loss.item() == pytest.approx(10 * math.log(2) ** 2 / 5)
    loss.backward()  # 2 log Z / 5
    assert log_normalizers_M.grad.tolist() == pytest.approx([0.4 * math.log(2), 1.2 * math.log(2)])


def test_z_loss_vanishes_where_probabilities_are_normalized_and_has_parts():
    assert z_loss(torch.log_softmax(torch.randn(7, 9), -1).logsumexp(-1), 7).item() == pytest.approx(0, abs=1e-12)
    values = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    assert (z_loss(values[:2], 3) + z_loss(values[2:], 3)).item() == pytest.approx((0.25 + 4 + 9) / 3, rel=1e-12)
    assert z_loss(values[:0], 3).item() == 0
