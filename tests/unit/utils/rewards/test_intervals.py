"""Intervals by hand, and beside the normal approximation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from training.utils.rewards.intervals import mean, ratio, share


def test_wilson_by_hand():
    """8 of 10, z = 1.96: centre (0.8 + 3.8415/20) / (1 + 3.8415/10) = 0.9921/1.3841 = 0.7167, half width
    1.96/1.3841 * sqrt(0.16/10 + 3.8415/400) = 1.4160 * 0.1600 = 0.2266."""
    figure = share(8, 10)
    assert figure.value == 0.8
    assert (figure.low, figure.high) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    assert str(figure) == "0.800 (95 % from 0.490 to 0.943)"


def test_wilson_where_all_or_none_succeed():
    """0 of n: the upper end is z^2 / (n + z^2)."""
    none, every = share(0, 20), share(20, 20)
    assert (none.low, none.high) == pytest.approx((0.0, 3.8415 / 23.8415), abs=1e-5)
    assert (every.low, every.high) == pytest.approx((1 - none.high, 1.0), abs=1e-9)


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
