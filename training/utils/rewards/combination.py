"""One score of several rewards: their sum, or that of an ensemble, which distrusts what its members disagree about.
Cheap to import: `--help` lists the ways.

Coste et al. 2023 ("Reward Model Ensembles Help Mitigate Overoptimization"): mean, worst case (`minimum`), and
uncertainty-weighted (theirs subtracts the variance times a coefficient; here it is the deviation, in units of rewards).
B responses, K rewards.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

SUM, MEAN, MINIMUM, LESS_DEVIATIONS = "sum", "mean", "minimum", "mean_minus_deviations"
COMBINATIONS = (SUM, MEAN, MINIMUM, LESS_DEVIATIONS)


class Combination(NamedTuple):
    """kind: one of COMBINATIONS. deviations: that mean_minus_deviations subtracts."""

    kind: str = SUM
    deviations: float = 1.0


def combined(summands_BK: torch.Tensor, applies_BK: torch.Tensor, combination: Combination) -> torch.Tensor:
    """Return [B], of rewards times their weights; 0 where none applies. applies_BK: bool, those that count."""
    kept_BK = summands_BK.where(applies_BK, 0.0)
    if combination.kind == SUM:
        return kept_BK.sum(dim=1)
    count_B = applies_BK.sum(dim=1)
    if combination.kind == MINIMUM:
        least_B = summands_BK.where(applies_BK, math.inf).amin(dim=1)
        return least_B.where(count_B > 0, 0.0)
    mean_B = kept_BK.sum(dim=1) / count_B.clamp(min=1)
    if combination.kind == MEAN:
        return mean_B
    off_BK = (summands_BK - mean_B[:, None]).where(applies_BK, 0.0)
    return mean_B - combination.deviations * (off_BK.square().sum(dim=1) / count_B.clamp(min=1)).sqrt()
