"""The SFT losses: sums over tokens divided by the step's count."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.step1_sft.loss import sft_loss, z_loss


def test_by_hand():
    # Probabilities 1/2 and 1/4 of a step with 4 target tokens: (ln 2 + 2 ln 2) / 4.
    logprobs_M = torch.log(torch.tensor([0.5, 0.25])).requires_grad_()
    loss = sft_loss(logprobs_M, tokens_in_step=4)
    assert loss.item() == pytest.approx(3 * math.log(2) / 4)
    loss.backward()
    assert logprobs_M.grad.tolist() == [-0.25, -0.25]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-20, 0), min_size=1, max_size=30), st.lists(st.integers(0, 30), max_size=4))
def test_parts_add_up_to_the_mean(values, cuts):
    logprobs_M = torch.tensor(values, dtype=torch.float64)
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [logprobs_M[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    total = sum(sft_loss(part, len(values)) for part in parts)
    assert total.item() == pytest.approx(-sum(values) / len(values), rel=1e-12)


def test_no_tokens_give_zero_on_the_graph():
    logprobs_M = torch.zeros(3, requires_grad=True)
    loss = sft_loss(logprobs_M[:0], 5)
    loss.backward()
    assert loss.item() == 0 and logprobs_M.grad.tolist() == [0, 0, 0]


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
