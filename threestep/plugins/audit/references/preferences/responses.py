"""Inputs of the losses of responses. S sequences, P pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    """log 1 / (1 + exp(-x)), without overflow."""
    return -np.logaddexp(0.0, -x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return np.exp(log_sigmoid(x))


def smoothed(reward_P: np.ndarray, smoothing: float) -> np.ndarray:
    """-(1 - e) log sigmoid(h) - e log sigmoid(-h) (Mitchell 2023, equation 3). h = 0: log 2."""
    return -(1.0 - smoothing) * log_sigmoid(reward_P) - smoothing * log_sigmoid(-reward_P)


@dataclass(frozen=True)
class Term:
    """The constants of a loss. point: of marked responses, one or [S]. weights: of good and bad ones."""

    beta: float
    smoothing: float = 0.0
    gamma: float = 0.5
    alpha: float = 1.0
    point: float | np.ndarray = 0.0
    weights: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class ResponseSums:
    """sums_S: log-probabilities of responses. weighted_S: the same where tokens beyond the shortest response weigh less
    (LD-DPO); else alike. reference_S: the reference's, so weighted; 0 without one. tokens_S: their lengths.
    chosen_P, rejected_P: the sequences of each pair. shares_P: of a number of the chosen response,
    what each of its pairs has, so that by their weights they have it once. good_S: bool, of marked ones."""

    sums_S: np.ndarray
    weighted_S: np.ndarray
    reference_S: np.ndarray
    tokens_S: np.ndarray
    chosen_P: np.ndarray
    rejected_P: np.ndarray
    shares_P: np.ndarray | None = None
    good_S: np.ndarray | None = None

    @property
    def ratios_S(self) -> np.ndarray:
        """log pi / pi_ref."""
        return self.weighted_S - self.reference_S

    @property
    def mean_ratios_S(self) -> np.ndarray:
        """The same over tokens."""
        return self.ratios_S / self.tokens_S

    @property
    def means_S(self) -> np.ndarray:
        """Log-probabilities over tokens."""
        return self.sums_S / self.tokens_S

    def gap(self, values_S: np.ndarray) -> np.ndarray:
        """Return [P], chosen minus rejected."""
        return values_S[self.chosen_P] - values_S[self.rejected_P]

    def shared(self, values_S: np.ndarray) -> np.ndarray:
        """Return [P], the chosen response's, shared out over its pairs."""
        values_P = values_S[self.chosen_P]
        return values_P if self.shares_P is None else values_P * self.shares_P

    def swapped(self) -> ResponseSums:
        return replace(self, chosen_P=self.rejected_P, rejected_P=self.chosen_P)
