"""The ranking loss: -log sigmoid(better - worse), prompts counted alike."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.step2_reward.loss import ranking_loss

pairs = st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30), st.floats(0, 1)), min_size=1, max_size=20)


def test_by_hand():
    # Equal scores: -log(1/2). A gap of log 3: -log(3/4). Weights 1 and 1/2, two prompts in the step.
    better_Q = torch.tensor([0.7, math.log(3)], requires_grad=True)
    loss = ranking_loss(better_Q, torch.tensor([0.7, 0.0]), torch.tensor([1.0, 0.5]), prompts_in_step=2)
    assert loss.item() == pytest.approx((math.log(2) + 0.5 * math.log(4 / 3)) / 2)
    loss.backward()  # -sigmoid(worse - better) x weight / prompts: -1/2 x 1 / 2, -1/4 x 1/2 / 2
    torch.testing.assert_close(better_Q.grad, torch.tensor([-0.25, -0.0625]))


@settings(max_examples=50, deadline=None)
@given(pairs)
def test_against_the_naive_formula(pairs):
    better_Q, worse_Q, weight_Q = (torch.tensor(column) for column in zip(*pairs, strict=True))
    expected = sum(
        weight * math.log1p(math.exp(worse - better)) for better, worse, weight in zip(
            better_Q.tolist(), worse_Q.tolist(), weight_Q.tolist(), strict=True
        )
    ) / 7  # fmt: skip
    assert ranking_loss(better_Q, worse_Q, weight_Q, 7).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_wide_gap_does_not_overflow():
    """log(1 + exp(x)) does, from a gap of 89 on in float32."""
    better_Q = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss = ranking_loss(better_Q, torch.zeros(2), torch.ones(2), 1)
    assert loss.item() == 500.0
    loss.backward()
    assert better_Q.grad.tolist() == [-1.0, 0.0]


@settings(max_examples=50, deadline=None)
@given(pairs, st.lists(st.integers(0, 20), max_size=4))
def test_parts_add_up_to_the_whole(pairs, cuts):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)]
    edges = [0, *sorted(min(cut, len(pairs)) for cut in cuts), len(pairs)]
    parts = [
        ranking_loss(*(column[a:b] for column in columns), 5).item() for a, b in zip(edges, edges[1:], strict=False)
    ]
    assert sum(parts) == pytest.approx(ranking_loss(*columns, 5).item(), rel=1e-12)


def test_no_pairs_give_zero_on_the_graph():
    scores = torch.zeros(3, requires_grad=True)
    loss = ranking_loss(scores[:0], scores[:0], torch.ones(0), 5)
    loss.backward()
    assert loss.item() == 0 and scores.grad.tolist() == [0, 0, 0]
