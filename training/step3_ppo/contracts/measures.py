"""Numbers that are spread over the ranks, and their statistics over all ranks. Pure tensors.

Each figure names its statistic; ranks exchange five moments a measure, from which all statistics follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch


class Measure(NamedTuple):
    """values: float or bool of any shape, this rank's. shows: figures by their statistic, an entry of STATISTICS."""

    values: torch.Tensor
    shows: Mapping[str, str]


class Moments(NamedTuple):
    """Moments of a measure's numbers: their count, sum, sum of squares, least and largest."""

    number: float
    total: float
    squares: float
    least: float
    most: float

    def joined(self, other: Moments) -> Moments:
        return Moments(
            self.number + other.number,
            self.total + other.total,
            self.squares + other.squares,
            min(self.least, other.least),
            max(self.most, other.most),
        )


NOTHING = Moments(0.0, 0.0, 0.0, math.inf, -math.inf)
# Of one or more numbers. std is theirs, the root of the mean square distance from the mean.
STATISTICS: dict[str, Callable[[Moments], float]] = {
    "total": lambda found: found.total,
    "mean": lambda found: found.total / found.number,
    "std": lambda found: math.sqrt(max(found.squares / found.number - (found.total / found.number) ** 2, 0.0)),
    "min": lambda found: found.least,
    "max": lambda found: found.most,
    # Of importance weights (Kong 1992), as a share of their number: 1 where all weigh the same.
    "ess": lambda found: found.total**2 / (found.number * found.squares) if found.squares else 0.0,
    # Of ratios p / q of draws from q: the chi-square divergence of p from q, E[ratio^2] - 1.
    "chi2": lambda found: found.squares / found.number - 1.0,
}


def spread(name: str, mean: str | None = None) -> dict[str, str]:
    """Return figures of mean, deviation and extremes: NAME_mean (or `mean`), NAME_std, NAME_min and NAME_max."""
    return {"mean": mean or f"{name}_mean", **{statistic: f"{name}_{statistic}" for statistic in ("std", "min", "max")}}


def moments(measures: Sequence[Measure]) -> list[Moments]:
    """Return the moments of each measure; the host waits for the device once."""
    if not measures:
        return []
    return [Moments(*row) for row in torch.stack([_row(measure.values) for measure in measures]).tolist()]


def _row(values: torch.Tensor) -> torch.Tensor:
    if not values.numel():
        return torch.tensor(NOTHING, dtype=torch.float64, device=values.device)
    values = values.double()
    ends = torch.aminmax(values)
    count = torch.full_like(ends.min, values.numel())
    return torch.stack([count, values.sum(), values.square().sum(), ends.min, ends.max])


def figures_of(measures: Sequence[Measure], totals: Sequence[Moments]) -> dict[str, float]:
    """Return the measures' statistics from moments over all ranks; none where there are no numbers."""
    return {
        figure: STATISTICS[statistic](of_all)
        for measure, of_all in zip(measures, totals, strict=True)
        for statistic, figure in measure.shows.items()
        if of_all.number
    }
