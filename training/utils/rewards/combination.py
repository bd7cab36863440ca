"""The ways to one score of several rewards, by name. Cheap to import: `--help` lists them. See `combining`."""

from __future__ import annotations

from typing import NamedTuple

SUM, MEAN, MINIMUM, LESS_DEVIATIONS = "sum", "mean", "minimum", "mean_minus_deviations"
COMBINATIONS = (SUM, MEAN, MINIMUM, LESS_DEVIATIONS)


class Combination(NamedTuple):
    """kind: one of COMBINATIONS. deviations: that mean_minus_deviations subtracts."""

    kind: str = SUM
    deviations: float = 1.0
