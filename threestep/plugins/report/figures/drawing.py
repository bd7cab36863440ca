"""The charts as the numbers that the page's script draws: JSON values, thinned. Colours and sizes are the page's."""

from __future__ import annotations

import itertools
from typing import Any

from threestep.plugins.report.figures.charts import (
    Chart,
    ChartLine,
    HistogramChart,
    LineChart,
    Points,
    ScatterChart,
    running_mean,
    thinned,
)
from threestep.plugins.report.figures.course import when
from threestep.plugins.report.figures.numbers import shown

COLOURS = 8
_MOST_POINTS = 2000  # of a curve: the least and the greatest of each part, so that zooming in finds every spike
_MOST_MEANS = 600  # of its running mean, which has no spikes


def drawing_of(chart: Chart) -> dict[str, Any] | None:
    """Data that the script draws a chart from, and its text alternative; None if it holds no number."""
    if isinstance(chart, LineChart):
        return _lines(chart)
    return _histogram(chart) if isinstance(chart, HistogramChart) else _scatter(chart)


def in_words(chart: Chart) -> str:
    """The values of a chart whose lines have one or two each, or the same one throughout, which a sentence says better;
    "" for other charts, and for evaluations of several runs."""
    if not isinstance(chart, LineChart):
        return ""
    lines = known_lines(chart)
    values = {y for line in chart.lines for _, y in line.points}
    if len(values) == 1 and lines and sum(len(line.points) for line in lines) > 2 * len(lines):
        return f"{shown(lines[0].known[0][1])} throughout"
    compares = len(lines) > 1 and all(line.is_evaluation and len(line.known) > 1 for line in lines)
    if compares or any(len(line.points) > 2 for line in chart.lines):
        return ""
    named = len(lines) > 1 or any(line.is_evaluation for line in lines)
    return "; ".join(
        f"{f'{line.label} ' if named else ''}{', '.join(f'{shown(y)} {when(x)}' for x, y in line.known)}"
        for line in lines
    )


def known_lines(chart: LineChart) -> list[ChartLine]:
    """The lines that have a value."""
    return [line for line in chart.lines if line.known]


def _lines(chart: LineChart) -> dict[str, Any] | None:
    lines = known_lines(chart)
    if not lines:
        return None
    last = ", ".join(f"{line.label}: {shown(line.known[-1][1])}" for line in lines)
    return {
        "kind": "lines",
        "label": f"{chart.title}; last values: {last}",
        "x": chart.x_label,
        "lines": [
            {
                "colour": line.colour % COLOURS,
                "held": line.is_evaluation,
                **_columns(thinned(line.points, _MOST_POINTS)),
                "mean": _mean(line),
                **({"best": list(line.marked)} if line.marked else {}),
            }
            for line in lines
        ],
    }


def _columns(points: Points) -> dict[str, list]:
    """The points as columns of x and y, to six digits: finer than a dot at the greatest zoom."""
    return {"xs": [_plain(x) for x, _ in points], "ys": [None if y is None else float(f"{y:.6g}") for _, y in points]}


def _mean(line: ChartLine) -> dict[str, list] | None:
    return _columns(thinned(running_mean(line.points, line.window), _MOST_MEANS)) if line.window > 1 else None


def _histogram(chart: HistogramChart) -> dict[str, Any] | None:
    shares = chart.shares
    if not any(itertools.chain.from_iterable(shares)):
        return None
    totals = ", ".join(f"{sum(counts):,} {label}" for label, counts in chart.counts)
    return {
        "kind": "histogram",
        "label": f"{chart.title}: {totals}",
        "x": chart.x_label,
        "edges": [float(f"{edge:.6g}") for edge in chart.edges],
        "kinds": [
            {"colour": place % COLOURS, "shares": [round(share, 3) for share in of_kind], "counts": list(counts)}
            for place, (of_kind, (_, counts)) in enumerate(zip(shares, chart.counts, strict=True))
        ],
    }


def _scatter(chart: ScatterChart) -> dict[str, Any] | None:
    if not any(cloud for _, cloud in chart.clouds):
        return None
    return {
        "kind": "scatter",
        "label": f"{chart.title}: {chart.y_label} over {chart.x_label}",
        "x": chart.x_label,
        "clouds": [{"colour": place % COLOURS, **_columns(cloud)} for place, (_, cloud) in enumerate(chart.clouds)],
    }


def _plain(x: float) -> float | int:
    """Steps as whole numbers: half the text of 1.0."""
    return int(x) if x == int(x) else round(x, 3)
