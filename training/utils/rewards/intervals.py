"""Shares and means with 95 % confidence intervals. N prompts or rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000
_RESAMPLED_NUMBERS = 2_000_000  # at a time


@dataclass(frozen=True)
class Figure:
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} (95 % from {self.low:.3f} to {self.high:.3f})"


def mean(values: Sequence[float], seed: int) -> Figure:
    """The mean with the bootstrap's percentile interval (Efron and Tibshirani 1993, section 13.3). For differences on
    the same prompts, this is the paired bootstrap."""
    return ratio(values, [1.0] * len(values), seed)


def resamples(count: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the places of rows that are drawn with replacement: some resamples [R, N] at a time, 2,000 in all."""
    draws, at_once = np.random.default_rng(seed), max(1, _RESAMPLED_NUMBERS // count)
    for first in range(0, _RESAMPLES, at_once):
        yield draws.integers(0, count, (min(at_once, _RESAMPLES - first), count))


def ratio(tops: Sequence[float], bottoms: Sequence[float], seed: int) -> Figure:
    """sum(tops) / sum(bottoms), with the same interval over the N pairs: a mean over tokens, resampled by rows."""
    top_N, bottom_N = np.asarray(tops, np.float64), np.asarray(bottoms, np.float64)
    ratios = [top_N[places].sum(axis=1) / bottom_N[places].sum(axis=1) for places in resamples(len(top_N), seed)]
    low, high = np.percentile(np.concatenate(ratios), [2.5, 97.5])
    return Figure(float(top_N.sum() / bottom_N.sum()), float(low), float(high))
