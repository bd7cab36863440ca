"""Inputs of the policy's losses. T tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bounds:
    """low, high: of the ratio, around 1. dual: of the dual clip. penalty: KL-Cov's. taus: SAPO's, for advantages above
    0 and others."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    penalty: float = 0.0
    taus: tuple[float, float] = (1.0, 1.05)


@dataclass(frozen=True)
class Tokens:
    """new_T: log-probabilities with a gradient. held_T: the same numbers without one. old_T: of the policy that rolled
    out. counted_T: bool. selected_T: bool, that KL-Cov and Clip-Cov treat apart."""

    new_T: np.ndarray
    held_T: np.ndarray
    old_T: np.ndarray
    advantage_T: np.ndarray
    counted_T: np.ndarray
    sequence_T: np.ndarray
    selected_T: np.ndarray | None = None

    @property
    def log_ratio_T(self) -> np.ndarray:
        """log p - log p_old, held within +- 20."""
        return np.where(self.counted_T, np.clip(self.new_T - self.old_T, -20.0, 20.0), 0.0)

    @property
    def held_log_ratio_T(self) -> np.ndarray:
        """The same without a gradient."""
        return np.where(self.counted_T, np.clip(self.held_T - self.old_T, -20.0, 20.0), 0.0)

    def means(self, values_T: np.ndarray) -> np.ndarray:
        """Return [T], each sequence's mean over the tokens that count."""
        count = int(self.sequence_T.max(initial=-1)) + 1
        sums_S = np.bincount(self.sequence_T, np.where(self.counted_T, values_T, 0.0), minlength=count)
        counts_S = np.bincount(self.sequence_T, self.counted_T.astype(np.float64), minlength=count)
        return (sums_S / np.maximum(counts_S, 1.0))[self.sequence_T]
