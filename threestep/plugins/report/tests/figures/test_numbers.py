"""Numbers as people read them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from threestep.plugins.report.figures.numbers import duration, shown, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.5, "0.5"), (0.12345, "0.1235"), (12.3456, "12.35"), (1234.5, "1,234"), (-2.0, "-2"), (None, "–"),
     (1e-5, "1e-5"), (1.25e7, "1.25e7"), (999.96, "1000"), (100.0, "100")],
)  # fmt: skip
def test_numbers_as_people_read_them(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(3.21, "3.2 s"), (245, "4 min 05 s"), (7620, "2 h 07 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "points",
    [[(1, 2.0), (2, 2.0)], [(0, 0.0), (1, 0.0)], [(1, -1e299), (2, 1e299)], [(1, 1e-30), (2, 2e-30)],
     [(10**9, 5.0), (10**9 + 1, 5.0 + 1e-9)]],
)  # fmt: skip
def test_strange_ranges_are_drawn(points):
    svg = sparkline(points)
    assert "nan" not in svg and "inf" not in svg
    ElementTree.fromstring(svg)
    assert sparkline(points[:1]) == ""
