"""Draws a chart as SVG, with classes instead of colours: the page's style sets them, for light and dark.

Hovering (or a tap) shows the values at a step, by style alone, without a script. All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from training.utils.report.charts import (
    Chart,
    ChartLine,
    HistogramChart,
    LineChart,
    Points,
    ScatterChart,
    running_mean,
    thinned,
)

WIDTH, HEIGHT = 420, 232  # in the drawing's own units; the page stretches it
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 8, 32
_MOST_POINTS = 800  # of a curve
_MOST_HOVERS = 40  # steps whose values the pointer shows
_COLOURS = 8


@dataclass(frozen=True)
class Frame:
    """Maps values to the drawing's units."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - _TOP - _BOTTOM)


def draw(chart: Chart) -> str:
    """Return the `<svg>` element of a chart; "" if there is nothing to draw."""
    if isinstance(chart, LineChart):
        return _line_chart(chart)
    return _histogram(chart) if isinstance(chart, HistogramChart) else _scatter(chart)


def sparkline(points: Points) -> str:
    """A word-sized curve without axes."""
    known = [(x, y) for x, y in thinned(points, 60) if y is not None]
    if len(known) < 2:
        return ""
    width, height, room = 96.0, 22.0, 2.0
    (x_low, x_high), (y_low, y_high) = (_bounds([point[axis] for point in known]) for axis in (0, 1))
    path = " ".join(
        f"{room + (x - x_low) / (x_high - x_low) * (width - 2 * room):.1f},"
        f"{height - room - (y - y_low) / (y_high - y_low) * (height - 2 * room):.1f}"
        for x, y in known
    )
    return (
        f'<svg class="spark" viewBox="0 0 {width:g} {height:g}" aria-hidden="true">'
        f'<polyline class="line c0" points="{path}"/></svg>'
    )


def shown(value: float | None) -> str:
    """A number to four significant digits."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """About `most` round numbers between low and high, 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.7 * raw)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """(least, greatest), or a range around them if all values are the same."""
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low, high


def _with_room(values: Sequence[float]) -> tuple[float, float]:
    low, high = _bounds(values)
    room = 0.05 * (high - low)
    floor = 0.0 if low >= 0 else -math.inf  # nothing below 0 for shares and losses
    return max(low - room, floor), high + room


def _line_chart(chart: LineChart) -> str:
    values = [point for line in chart.lines for point in line.known]
    if not values:
        return ""
    x_low, x_high = _bounds([x for x, _ in values])
    frame = Frame(x_low, x_high, *_with_room([y for _, y in values]))
    parts = [_axes(frame, chart.x_label, with_fractions=False)]
    parts += [_curve(line, frame) for line in chart.lines]
    parts += _hovers(chart.lines, frame)
    last = ", ".join(f"{line.label}: {shown(line.known[-1][1])}" for line in chart.lines if line.known)
    return _svg(f"{chart.title}; last values: {last}", parts)


def _curve(line: ChartLine, frame: Frame) -> str:
    colour = f"c{line.colour % _COLOURS}"
    dashes = " dashed" if line.is_evaluation else ""
    # Behind its mean, or because nothing is known between only two evaluations.
    faint = " faint" if line.window > 1 or (line.is_evaluation and len(line.known) < 3) else ""
    parts = [_path(thinned(line.points, _MOST_POINTS), frame, f"line{dashes}{faint} {colour}")]
    if line.window > 1:
        parts.append(_path(thinned(running_mean(line.points, line.window), _MOST_POINTS), frame, f"line {colour}"))
    if line.is_evaluation or len(line.known) == 1:
        for x, y in line.known[:: max(1, len(line.known) // 60)]:
            parts.append(f'<circle class="mark {colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"/>')
    return "".join(parts)


def _path(points: Points, frame: Frame, classes: str) -> str:
    """A path with gaps where values are missing."""
    words, pen_is_down = [], False
    for x, y in points:
        if y is not None:
            words.append(f"{'L' if pen_is_down else 'M'}{frame.x(x):.1f} {frame.y(y):.1f}")
        pen_is_down = y is not None
    return f'<path class="{classes}" d="{" ".join(words)}"/>'


def _hovers(lines: Sequence[ChartLine], frame: Frame) -> list[str]:
    """For some of the steps, a strip that shows its values under the pointer."""
    own = [dict(line.known) for line in lines]
    evaluated = sorted({x for line, values in zip(lines, own, strict=True) if line.is_evaluation for x in values})
    every = sorted({x for values in own for x in values})
    steps = sorted({*_spread(every, _MOST_HOVERS), *_spread(evaluated, _MOST_HOVERS // 2)})
    edges = [frame.x_low, *((a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)), frame.x_high]
    return [
        _hover(
            step, (left, right), [(line, ys[step]) for line, ys in zip(lines, own, strict=True) if step in ys], frame
        )
        for step, left, right in zip(steps, edges, edges[1:], strict=False)
    ]


def _hover(step: float, edges: tuple[float, float], known: Sequence[tuple[ChartLine, float]], frame: Frame) -> str:
    left, right = (frame.x(edge) for edge in edges)
    at = frame.x(step)
    texts = [f"step {step:,.0f}", *(f"{_cut(line.label)} {shown(value)}" for line, value in known)]
    width = 6.0 * max(len(text) for text in texts) + 22
    start = at + 8 if at + 8 + width < WIDTH else max(0.0, at - 8 - width)
    rows = "".join(
        f'<text x="{start + (6 if row == 0 else 16):.1f}" y="{_TOP + 15 + 15 * row}">{escape(text)}</text>'
        for row, text in enumerate(texts)
    )
    dots = "".join(
        f'<circle class="mark c{line.colour % _COLOURS}" cx="{at:.1f}" cy="{frame.y(value):.1f}" r="3.5"/>'
        f'<circle class="mark c{line.colour % _COLOURS}" cx="{start + 9:.1f}" cy="{_TOP + 11 + 15 * row}" r="3.5"/>'
        for row, (line, value) in enumerate(known, start=1)
    )
    return (
        f'<g class="hover"><rect class="zone" x="{left:.1f}" y="{_TOP}" width="{max(right - left, 1):.1f}" '
        f'height="{HEIGHT - _TOP - _BOTTOM}"/><g class="tip">'
        f'<path class="rule" d="M{at:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>'
        f'<rect class="box" x="{start:.1f}" y="{_TOP}" width="{width:.0f}" height="{15 * len(texts) + 6}" rx="4"/>'
        f"{rows}{dots}</g></g>"
    )


def _cut(label: str, most: int = 26) -> str:
    return label if len(label) <= most else f"…{label[1 - most :]}"


def _spread(steps: Sequence[float], most: int) -> list[float]:
    """At most `most` of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def _histogram(chart: HistogramChart) -> str:
    shares = chart.shares
    most = max((share for own in shares for share in own), default=0.0)
    if not most:
        return ""
    frame = Frame(*_bounds([chart.edges[0], chart.edges[-1]]), 0.0, most * 1.08)
    parts = [_axes(frame, chart.x_label)]
    for colour, own in enumerate(shares):
        words = [f"M{frame.x(chart.edges[0]):.1f} {frame.y(0):.1f}"]
        for left, right, share in zip(chart.edges, chart.edges[1:], own, strict=False):
            words.append(f"L{frame.x(left):.1f} {frame.y(share):.1f}H{frame.x(right):.1f}")
        words.append(f"V{frame.y(0):.1f}Z")
        parts.append(f'<path class="area c{colour}" d="{"".join(words)}"/>')
    for index, (left, right) in enumerate(zip(chart.edges, chart.edges[1:], strict=False)):
        tip = ", ".join(f"{label} {counts[index]:,}" for label, counts in chart.counts)
        parts.append(
            f'<rect class="zone" x="{frame.x(left):.1f}" y="{_TOP}" width="{frame.x(right) - frame.x(left):.1f}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}"><title>{shown(left)} to {shown(right)}: {escape(tip)}</title></rect>'
        )
    totals = ", ".join(f"{sum(counts):,} {label}" for label, counts in chart.counts)
    return _svg(f"{chart.title}: {totals}", parts)


def _scatter(chart: ScatterChart) -> str:
    points = [point for _, cloud in chart.clouds for point in cloud]
    if not points:
        return ""
    x_low, x_high = _bounds([x for x, _ in points])
    frame = Frame(x_low - 0.5, x_high + 0.5, *_with_room([y for _, y in points]))
    parts = [_axes(frame, chart.x_label)]
    for colour, (_, cloud) in enumerate(chart.clouds):
        parts += [
            f'<circle class="dot c{colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6"/>' for x, y in cloud
        ]
    return _svg(f"{chart.title}: {chart.y_label} over {chart.x_label}", parts)


def _axes(frame: Frame, x_label: str, with_fractions: bool = True) -> str:
    """with_fractions: whether the x axis has ticks between whole numbers; there is no step 1.5."""
    floor = HEIGHT - _BOTTOM
    parts = [f'<path class="axis" d="M{_LEFT} {floor}H{WIDTH - _RIGHT}"/>']
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{y + 3.5:.1f}">{_tick(value)}</text>')
    for value in ticks(frame.x_low, frame.x_high, 6):
        if not with_fractions and value != round(value):
            continue
        parts.append(f'<text class="tick x" x="{frame.x(value):.1f}" y="{floor + 14}">{_tick(value)}</text>')
    parts.append(f'<text class="tick name" x="{WIDTH - _RIGHT}" y="{HEIGHT - 3}">{escape(x_label)}</text>')
    return "".join(parts)


def _tick(value: float) -> str:
    """Shorter than `shown`: thousands as k."""
    if abs(value) < 1e-12:
        return "0"
    if 10_000 <= abs(value) < 1e6:
        return f"{value / 1000:g}k"
    return f"{value:g}" if 1e-3 <= abs(value) < 1e6 else shown(value)


def _svg(label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
