"""The value loss against numbers worked by hand and its naive formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.step3_ppo.losses.losses import value_loss

numbers = st.floats(-3, 3)


def test_by_hand():
    # clip 0.2.                     v    old   R   (v-R)^2  clip(v)  (clip-R)^2  larger
    #   clipped: it ran ahead    1.5  1.0  2.0    0.25     1.2       0.64       0.64
    #   not: the error is larger 1.5  1.0  1.0    0.25     1.2       0.04       0.25
    #   inside the range         1.1  1.0  0.0    1.21     1.1       1.21       1.21
    #   clipped downwards        0.5  1.0  0.0    0.25     0.8       0.64       0.64
    values_M = torch.tensor([1.5, 1.5, 1.1, 0.5], requires_grad=True)
    loss_M, clipped_M = value_loss(values_M, torch.ones(4), torch.tensor([2.0, 1.0, 0.0, 0.0]), 0.2)
    torch.testing.assert_close(loss_M, torch.tensor([0.32, 0.125, 0.605, 0.32]))
    assert clipped_M.tolist() == [True, False, False, True]
    loss_M.sum().backward()
    torch.testing.assert_close(values_M.grad, torch.tensor([0.0, 0.5, 1.1, 0.0]))


def test_a_value_inside_the_range_never_counts_as_clipped():
    """old + clamp(v - old) is not v in float32: of these tokens, one in forty would have the larger error."""
    generator = torch.Generator().manual_seed(0)
    old_M, values_M, error_M = torch.randn(3, 1000, generator=generator) * 0.1
    inside_M = (values_M - old_M).abs() < 0.199
    old_M, values_M, returns_M = old_M[inside_M], values_M[inside_M], (values_M + 10 * error_M)[inside_M]
    _, clipped_M = value_loss(values_M, old_M, returns_M, 0.2)
    assert not clipped_M.any() and len(values_M) > 500


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=20))
def test_the_naive_formula(rows):
    expected = []
    for value, old, target in rows:
        held = min(max(value, old - 0.2), old + 0.2)
        expected.append(0.5 * max((value - target) ** 2, (held - target) ** 2))
    columns = [torch.tensor([row[place] for row in rows], dtype=torch.float64) for place in range(3)]
    before = [column.clone() for column in columns]
    assert value_loss(*columns, 0.2)[0].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert all(torch.equal(one, two) for one, two in zip(columns, before, strict=True))
