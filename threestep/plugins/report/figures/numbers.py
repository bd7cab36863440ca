"""Numbers as people read them: four significant digits, durations, a word-sized curve. Knows nothing of runs."""

from __future__ import annotations

import math

from threestep.plugins.report.figures.charts import Points, thinned


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


def shown_together(before: float | None, after: float | None) -> tuple[str, str]:
    """Two numbers to compare, with the same decimals: three significant digits of the larger one."""
    sizes = [abs(value) for value in (before, after) if value is not None]
    largest = max(sizes, default=0.0)
    if not 1e-3 <= largest < 1000:
        return shown(before), shown(after)
    decimals = 2 - math.floor(math.log10(largest))
    first, second = ("–" if value is None else f"{value:.{decimals}f}" for value in (before, after))
    return first, second


def duration(seconds: float) -> str:
    """E.g. 3.2 s, 4 min 05 s or 2 h 07 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def sparkline(points: Points) -> str:
    """An SVG element of a curve without axes; "" for fewer than two values."""
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


def _bounds(values: list[float]) -> tuple[float, float]:
    """(least, greatest), or a range around them if all values are the same."""
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low, high
