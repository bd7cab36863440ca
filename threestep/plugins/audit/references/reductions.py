"""From losses of units (tokens, or pairs of responses) to one number. U units of all ranks and micro-batches.

`REDUCTIONS` are those of papers; `MISTAKES` are what trainers were seen to compute in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Units:
    """values_U: losses. weights_U: 1 where a unit counts, 0 where not; of a pair its share of its prompt.
    groups: of each unit its sequence, its micro-batch (numbered over all ranks) and its rank.
    longest: the constant of the sum norm. full: micro-batches of a rank in a whole step, if it has fewer."""

    values_U: np.ndarray
    weights_U: np.ndarray
    sequence_U: np.ndarray
    micro_U: np.ndarray
    rank_U: np.ndarray
    micro_batches: int = 1
    ranks: int = 1
    longest: float = 0.0
    full: float = 0.0

    @property
    def of_each_rank(self) -> float:
        """Micro-batches of a rank."""
        return self.micro_batches / self.ranks

    def with_values(self, values_U: np.ndarray) -> Units:
        return replace(self, values_U=values_U)


Reduction = Callable[[Units], float]


def token_mean(units: Units) -> float:
    """sum w l / sum w: of tokens (Yu et al. 2025, DAPO, equation 12), or of pairs (Ouyang et al. 2022, equation 1)."""
    return _ratio((units.weights_U * units.values_U).sum(), units.weights_U.sum())


def sequence_mean(units: Units) -> float:
    """The mean over sequences of the mean over their tokens (Shao et al. 2024, equation 3)."""
    return float(np.mean(_means_of(units, units.sequence_U)))


def sequence_sum(units: Units) -> float:
    """The mean over sequences of the sum over their tokens."""
    return _ratio((units.weights_U * units.values_U).sum(), counted_sequences(units))


def sequence_sum_norm(units: Units) -> float:
    """The same, divided by the longest response there can be (Liu et al. 2025, Dr. GRPO, section 3.2)."""
    return sequence_sum(units) / units.longest


def counted_sequences(units: Units) -> float:
    """The number of sequences that have a unit that counts."""
    return float(len(np.unique(units.sequence_U[units.weights_U > 0])))


REDUCTIONS: dict[str, Reduction] = {
    "token mean": token_mean,
    "sequence mean": sequence_mean,
    "sequence sum": sequence_sum,
    "sequence sum norm": sequence_sum_norm,
}


def mean_of_micro_batches(units: Units) -> float:
    return float(np.mean(_means_of(units, units.micro_U)))


def mean_of_ranks(units: Units) -> float:
    return float(np.mean(_means_of(units, units.rank_U)))


def plain_sum(units: Units) -> float:
    return float((units.weights_U * units.values_U).sum())


def mean_with_first_tokens(units: Units) -> float:
    """The count has one token more for each sequence: its first, whose label a shift drops (tf #46204)."""
    return _ratio(plain_sum(units), units.weights_U.sum() + counted_sequences(units))


def mean_over_all(units: Units) -> float:
    """The count has all tokens, those of prompts (and padding) too."""
    return _ratio(plain_sum(units), float(len(units.weights_U)))


def partial_over_full(units: Units) -> float:
    """The mean over the micro-batches of a whole step, of which this one has fewer."""
    return mean_of_micro_batches(units) * units.of_each_rank / units.full


def last_micro_batch(units: Units) -> float:
    last = units.micro_U == units.micro_U.max()
    return token_mean(replace(units, weights_U=units.weights_U * last))


def first_rank(units: Units) -> float:
    return token_mean(replace(units, weights_U=units.weights_U * (units.rank_U == 0)))


# The sentence that names each, and what it needs to differ from the right one.
MISTAKES: dict[str, Callable[[Units, Reduction], float]] = {
    "the mean over micro-batches of their means, in place of the mean over the whole step": (
        lambda units, right: mean_of_micro_batches(units)
    ),
    "the sum over micro-batches of their means: not divided by the accumulation": (
        lambda units, right: mean_of_micro_batches(units) * units.of_each_rank
    ),
    "the mean over ranks of their own means: denominators are local": lambda units, right: mean_of_ranks(units),
    "the mean over sequences of their means": lambda units, right: sequence_mean(units),
    "the mean over sequences, including those in which no token counts": (
        lambda units, right: sequence_mean(units) * counted_sequences(units) / len(np.unique(units.sequence_U))
    ),
    "the mean over all tokens alike, in place of a mean over sequences": lambda units, right: token_mean(units),
    "the sum of each sequence, in place of its mean": lambda units, right: sequence_sum(units),
    "a sum that is divided by nothing": lambda units, right: plain_sum(units),
    "a count with one extra token per sequence: the first, which nothing predicts": (
        lambda units, right: mean_with_first_tokens(units)
    ),
    "a count of all tokens, including those that carry no loss": lambda units, right: mean_over_all(units),
    "the last, partial accumulation divided by the micro-batches of a whole one": (
        lambda units, right: partial_over_full(units) if units.full else np.nan
    ),
    "right except for a factor: divided by the micro-batches of a whole accumulation, of which this step has fewer": (
        lambda units, right: right(units) * units.of_each_rank / units.full if units.full else np.nan
    ),
    "not divided by the number of micro-batches": lambda units, right: right(units) * units.of_each_rank,
    "divided by the number of micro-batches once more": lambda units, right: right(units) / units.of_each_rank,
    "divided by the number of ranks once more": lambda units, right: right(units) / units.ranks,
    "multiplied by the number of ranks": lambda units, right: right(units) * units.ranks,
    "the last micro-batch alone": lambda units, right: last_micro_batch(units),
    "the first rank alone": lambda units, right: first_rank(units),
}


def _means_of(units: Units, group_U: np.ndarray) -> np.ndarray:
    """The weighted mean of each group that has units that count."""
    _, place_U = np.unique(group_U, return_inverse=True)
    sums = np.bincount(place_U, units.weights_U * units.values_U)
    counts = np.bincount(place_U, units.weights_U)
    return sums[counts > 0] / counts[counts > 0]


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count else 0.0
