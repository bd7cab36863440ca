"""The charts of a report as plain records, without colours, sizes or files. svg.py and png.py draw them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float | None]]  # ascending x; None: a gap

_SMOOTH_FROM = 60  # points; shorter curves are not smoothed
_WINDOWS = 30  # a running mean spans about 1/30 of a curve's points


@dataclass(frozen=True)
class ChartLine:
    """One curve. colour: its place in the palette; is_evaluation: few, precise points, drawn with marks; is_smooth:
    without minibatch noise, so that it needs no running mean; best: the step of the run's best evaluation, which is
    marked, and best_by the figure that it is best by."""

    label: str
    points: Points
    colour: int
    is_evaluation: bool = False
    is_smooth: bool = False
    best: float | None = None
    best_by: str = ""

    @property
    def known(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        return [(x, y) for x, y in self.points if y is not None]

    @property
    def marked(self) -> tuple[float, float] | None:
        """The point at the best step."""
        return next(((x, y) for x, y in self.known if x == self.best), None)

    @property
    def window(self) -> int:
        """Points of its running mean; 1 if it has none."""
        noisy = len(self.points) >= _SMOOTH_FROM and not self.is_evaluation and not self.is_smooth
        return len(self.points) // (2 * _WINDOWS) * 2 + 1 if noisy else 1


@dataclass(frozen=True)
class LineChart:
    """Curves over optimizer steps."""

    title: str
    lines: tuple[ChartLine, ...]
    note: str = ""
    x_label: str = "step"


@dataclass(frozen=True)
class HistogramChart:
    """Counts of several kinds between the same edges: one more edge than counts. Drawn as percentages of each kind, as
    their totals may differ."""

    title: str
    edges: tuple[float, ...]
    counts: tuple[tuple[str, tuple[int, ...]], ...]  # (label, counts)
    x_label: str
    note: str = ""

    @property
    def shares(self) -> list[list[float]]:
        """Percentages between the edges, per kind."""
        return [[100.0 * count / max(sum(counts), 1) for count in counts] for _, counts in self.counts]


@dataclass(frozen=True)
class ScatterChart:
    """Points of several kinds."""

    title: str
    clouds: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]  # (label, points)
    x_label: str
    y_label: str
    note: str = ""


Chart = LineChart | HistogramChart | ScatterChart


def running_mean(points: Points, window: int) -> list[tuple[float, float]]:
    """Running mean: (x, mean of the `window` finite values around it, fewer at the ends). window: odd."""
    known = [(x, y) for x, y in points if y is not None]
    sums = [0.0, *itertools.accumulate(y for _, y in known)]
    half = window // 2
    means = []
    for place, (x, _) in enumerate(known):
        first, last = max(place - half, 0), min(place + half + 1, len(known))
        means.append((x, (sums[last] - sums[first]) / (last - first)))
    return means


def thinned(points: Points, most: int) -> list[tuple[float, float | None]]:
    """At most about `most` of the points, with the minimum and maximum of each part: no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = -(-4 * len(points) // most)
    shown: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        known = [index for index in part if points[index][1] is not None]
        picked = {part[0], part[-1]}
        if known:
            picked |= {min(known, key=lambda i: points[i][1] or 0.0), max(known, key=lambda i: points[i][1] or 0.0)}
        shown += [points[index] for index in sorted(picked)]
    return shown


def histogram_of(kinds: Sequence[tuple[str, Sequence[float]]], bins: int = 20) -> tuple[tuple[float, ...], list]:
    """(edges, [(label, counts)]) of values of several kinds, between common, equally spaced edges."""
    values = [value for _, numbers in kinds for value in numbers]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    width = (high - low) / bins
    counts = []
    for label, numbers in kinds:
        bin_counts = [0] * bins
        for value in numbers:
            bin_counts[min(int((value - low) / width), bins - 1)] += 1
        counts.append((label, tuple(bin_counts)))
    return tuple(low + width * index for index in range(bins + 1)), counts
