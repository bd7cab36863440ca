"""Intervals by hand, and beside the normal approximation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from training.utils.rewards.figures import mean, ratio


def test_the_bootstrap_of_many_numbers_is_the_normal_interval():
    values = np.random.default_rng(0).normal(2.0, 3.0, 2000)
    figure = mean(values.tolist(), seed=1)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert figure.value == pytest.approx(values.mean())
    assert (figure.low, figure.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)
    assert mean(values.tolist(), seed=1) == figure


def test_a_ratio_is_of_sums():
    """Losses 1 and 9 over 1 and 3 tokens: 10 / 4, and resampled by rows never outside 1/1 .. 9/3."""
    figure = ratio([1.0, 9.0], [1, 3], seed=0)
    assert (figure.value, figure.low, figure.high) == (2.5, 1.0, 3.0)
    same = mean([0.25] * 5, seed=0)
    assert (same.value, same.low, same.high) == (0.25, 0.25, 0.25)
