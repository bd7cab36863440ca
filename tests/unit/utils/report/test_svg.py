"""What is drawn is what the numbers say: the axes' own labels turn the drawing's units back into values."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from training.utils.report.charts import ChartLine, HistogramChart, LineChart, ScatterChart
from training.utils.report.svg import draw, shown, sparkline, ticks


def values_of(svg: str, curve: int = 0) -> list[tuple[float, float]]:
    """The values of the curve's path, read with the ticks of both axes."""
    root = ElementTree.fromstring(svg)

    def scale(axis: str, place: str):
        ends = [node for node in root.iter("text") if node.get("class") == f"tick {axis}"]
        low, high = ends[0], ends[-1]
        (at_low, low_value), (at_high, high_value) = (
            (float(node.get(place)) - (3.5 if place == "y" else 0), float(node.text)) for node in (low, high)
        )
        return lambda at: low_value + (at - at_low) / (at_high - at_low) * (high_value - low_value)

    to_x, to_y = scale("x", "x"), scale("y", "y")
    path = [node for node in root.iter("path") if (node.get("class") or "").startswith("line")][curve].get("d")
    return [(to_x(float(x)), to_y(float(y))) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def test_a_curve_lies_where_its_values_are():
    points = [(float(step), 5.0 / step) for step in range(1, 41)]
    read = values_of(draw(LineChart("Loss", (ChartLine("training", points, 0),))))
    assert len(read) == 40
    for (x, y), (step, value) in zip(read, points, strict=True):
        assert x == pytest.approx(step, abs=0.03) and y == pytest.approx(value, abs=0.01)


def test_a_gap_breaks_the_curve():
    svg = draw(LineChart("", (ChartLine("a", [(1, 1.0), (2, 2.0), (3, None), (4, 1.0), (5, 2.0)], 0),)))
    path = re.search(r'<path class="line c0" d="([^"]*)"', svg).group(1)
    assert [word[0] for word in re.findall(r"[ML][\d.]+", path)] == ["M", "L", "M", "L"]


def test_the_pointer_is_shown_each_step_with_its_values():
    lines = (
        ChartLine("training", [(step, step / 100) for step in range(1, 201)], 0),
        ChartLine("held-out", [(0, 7.0), (123, 5.25)], 1, is_evaluation=True),
    )
    root = ElementTree.fromstring(draw(LineChart("", lines)))
    tips = [[text.text for text in group.iter("text")] for group in root.iter("g") if group.get("class") == "tip"]
    assert len(tips) <= 42
    assert tips[0] == ["step 0", "held-out 7"]
    assert ["step 123", "training 1.23", "held-out 5.25"] in tips
    assert tips[-1] == ["step 200", "training 2"]
    zones = [float(rect.get("x")) for rect in root.iter("rect") if rect.get("class") == "zone"]
    assert zones == sorted(zones)


@pytest.mark.parametrize(
    "points",
    [[(1, 3.0)], [(1, 2.0), (2, 2.0)], [(0, 0.0), (1, 0.0)], [(1, -1e299), (2, 1e299)], [(1, 1e-30), (2, 2e-30)],
     [(10**9, 5.0), (10**9 + 1, 5.0 + 1e-9)]],
)  # fmt: skip
def test_strange_ranges_are_drawn(points):
    svg = draw(LineChart("", (ChartLine("a", points, 0),)))
    assert "nan" not in svg and "inf" not in svg
    ElementTree.fromstring(svg)


def test_nothing_to_draw_is_no_drawing():
    assert draw(LineChart("", (ChartLine("a", [(1, None)], 0),))) == ""
    assert draw(LineChart("", ())) == ""
    assert draw(HistogramChart("", (0.0, 1.0), (("a", (0,)),), "")) == ""
    assert draw(ScatterChart("", (("a", ()),), "", "")) == ""
    assert sparkline([(1, 1.0)]) == ""


def test_labels_are_escaped():
    evil = '"><script>alert(1)</script>'
    charts = (
        LineChart(evil, (ChartLine(evil, [(1, 1.0), (2, 2.0)], 0),), x_label=evil),
        HistogramChart(evil, (0.0, 1.0), ((evil, (3,)),), evil),
        ScatterChart(evil, ((evil, ((1.0, 1.0),)),), evil, evil),
    )
    for chart in charts:
        svg = draw(chart)
        assert "<script" not in svg
        ElementTree.fromstring(svg)


def test_a_histogram_has_the_counts_under_the_pointer():
    svg = draw(HistogramChart("", (0.0, 0.5, 1.0), (("chosen", (1, 2000)), ("rejected", (3, 4))), "score"))
    titles = [node.text for node in ElementTree.fromstring(svg).iter("title")]
    assert titles == ["0 to 0.5: chosen 1, rejected 3", "0.5 to 1: chosen 2,000, rejected 4"]


def test_a_histogram_is_drawn_in_percents_of_each_kind():
    chart = HistogramChart("", (0.0, 0.5, 1.0), (("a", (1, 3)), ("b", (10, 30)), ("none", (0, 0))), "score")
    assert chart.shares == [[25.0, 75.0], [25.0, 75.0], [0.0, 0.0]]
    paths = re.findall(r'<path class="area c[01]" d="([^"]*)"', draw(chart))
    assert len(paths) == 2 and paths[0] == paths[1]


def test_steps_have_no_fractions():
    svg = draw(LineChart("", (ChartLine("a", [(1, 1.0), (2, 2.0)], 0),)))
    assert re.findall(r'<text class="tick x"[^>]*>([^<]*)<', svg) == ["1", "2"]


def test_each_point_of_a_cloud_is_drawn():
    svg = draw(ScatterChart("", (("a", ((1.0, 1.0), (2.0, 3.0))), ("b", ((1.0, 2.0),))), "x", "y"))
    assert svg.count('class="dot c0"') == 2 and svg.count('class="dot c1"') == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.5, "0.5"), (0.12345, "0.1235"), (12.3456, "12.35"), (1234.5, "1,234"), (-2.0, "-2"), (None, "–"),
     (1e-5, "1e-5"), (1.25e7, "1.25e7"), (999.96, "1000"), (100.0, "100")],
)  # fmt: skip
def test_numbers_as_people_read_them(value, text):
    assert shown(value) == text


def test_ticks_are_round_and_inside():
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(-3.0, 7.2) == pytest.approx([-2, 0, 2, 4, 6])
    assert ticks(101.0, 199.0) == pytest.approx([120, 140, 160, 180])
