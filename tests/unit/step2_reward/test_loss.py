"""The ranking loss: -log sigmoid(better - worse), prompts counted alike."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.step2_reward.loss import LossOptions, ranking_loss

pairs = st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30), st.floats(0, 1)), min_size=1, max_size=20)


def plain_loss(better_Q, worse_Q, weight_Q, prompts_in_step):
    return ranking_loss(
        better_Q, worse_Q, torch.zeros_like(worse_Q), weight_Q, prompts_in_step=prompts_in_step, options=LossOptions()
    )


def test_by_hand():
    # Equal scores: -log(1/2). A gap of log 3: -log(3/4). Weights 1 and 1/2, two prompts in the step.
    better_Q = torch.tensor([0.7, math.log(3)], requires_grad=True)
    loss = plain_loss(better_Q, torch.tensor([0.7, 0.0]), torch.tensor([1.0, 0.5]), 2)
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
    assert plain_loss(better_Q, worse_Q, weight_Q, 7).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_wide_gap_does_not_overflow():
    """log(1 + exp(x)) does, from a gap of 89 on in float32."""
    better_Q = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss = plain_loss(better_Q, torch.zeros(2), torch.ones(2), 1)
    assert loss.item() == 500.0
    loss.backward()
    assert better_Q.grad.tolist() == [-1.0, 0.0]


@settings(max_examples=50, deadline=None)
@given(pairs, st.lists(st.integers(0, 20), max_size=4))
def test_parts_add_up_to_the_whole(pairs, cuts):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)]
    edges = [0, *sorted(min(cut, len(pairs)) for cut in cuts), len(pairs)]
    parts = [plain_loss(*(column[a:b] for column in columns), 5).item() for a, b in zip(edges, edges[1:], strict=False)]
    assert sum(parts) == pytest.approx(plain_loss(*columns, 5).item(), rel=1e-12)


def test_no_pairs_give_zero_on_the_graph():
    scores = torch.zeros(3, requires_grad=True)
    loss = plain_loss(scores[:0], scores[:0], torch.ones(0), 5)
    loss.backward()
    assert loss.item() == 0 and scores.grad.tolist() == [0, 0, 0]


# better 1.5 and 0, worse 0.5 and 1, margins 2 and 0: gaps 1 and -1; weights 1 and 1/2, two prompts.
BETTER, WORSE, MARGIN, WEIGHT = [1.5, 0.0], [0.5, 1.0], [2.0, 0.0], [1.0, 0.5]


def by_hand(options: LossOptions) -> tuple[float, list[float]]:
    """(loss, its gradient for better_Q)."""
    better_Q = torch.tensor(BETTER, dtype=torch.float64, requires_grad=True)
    worse_Q, margin_Q, weight_Q = (torch.tensor(column, dtype=torch.float64) for column in (WORSE, MARGIN, WEIGHT))
    loss = ranking_loss(better_Q, worse_Q, margin_Q, weight_Q, prompts_in_step=2.0, options=options)
    loss.backward()
    return loss.item(), better_Q.grad.tolist()


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_margin_moves_the_gap():
    # h = gap - margin_scale x margin: 1 - 0.25 x 2 = 0.5, and -1.
    loss, gradient = by_hand(LossOptions(margin_scale=0.25))
    assert loss == pytest.approx((softplus(-0.5) + 0.5 * softplus(1.0)) / 2)
    assert gradient == pytest.approx([-sigmoid(-0.5) / 2, -0.5 * sigmoid(1.0) / 2])


def test_label_smoothing_is_cross_entropy_with_a_soft_label():
    # 0.9 of -log sigmoid(h) and 0.1 of -log sigmoid(-h); d/dh = sigmoid(h) - 0.9.
    loss, gradient = by_hand(LossOptions(label_smoothing=0.1))
    pairs = [0.9 * softplus(-1.0) + 0.1 * softplus(1.0), 0.9 * softplus(1.0) + 0.1 * softplus(-1.0)]
    assert loss == pytest.approx((pairs[0] + 0.5 * pairs[1]) / 2)
    assert gradient == pytest.approx([(sigmoid(1.0) - 0.9) / 2, 0.5 * (sigmoid(-1.0) - 0.9) / 2])


def test_centring_squares_the_sum_of_both_scores():
    # sums 2 and 1: 0.01 x (4 + 0.5 x 1) / 2 on top; d/d better = 0.01 x 2 x sum x weight / 2.
    plain, plain_gradient = by_hand(LossOptions())
    loss, gradient = by_hand(LossOptions(center_coef=0.01))
    assert loss - plain == pytest.approx(0.01 * (4 + 0.5) / 2)
    assert [a - b for a, b in zip(gradient, plain_gradient, strict=True)] == pytest.approx([0.02, 0.005])


def test_all_options_at_once():
    loss, _ = by_hand(LossOptions(margin_scale=1.0, label_smoothing=0.2, center_coef=0.5))
    first = 0.8 * softplus(1.0) + 0.2 * softplus(-1.0) + 0.5 * 4  # h = 1 - 2
    second = 0.8 * softplus(1.0) + 0.2 * softplus(-1.0) + 0.5 * 1  # h = -1 - 0
    assert loss == pytest.approx((first + 0.5 * second) / 2)


def test_the_options_are_off_by_default():
    assert by_hand(LossOptions())[0] == pytest.approx((softplus(-1.0) + 0.5 * softplus(1.0)) / 2)
