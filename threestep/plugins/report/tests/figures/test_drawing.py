"""What the script draws are the numbers of the charts, as JSON."""

from __future__ import annotations

import json
import math

from threestep.plugins.report.figures.charts import ChartLine, HistogramChart, LineChart, ScatterChart
from threestep.plugins.report.figures.drawing import drawing_of, in_words


def test_a_short_curve_is_all_its_values_with_its_gaps():
    points = [(1.0, 5.0), (2.0, None), (3.0, 1 / 3)]
    held = ChartLine("held-out", [(0, 7.0), (3, 2.0)], 9, is_evaluation=True)
    drawn = drawing_of(LineChart("Loss", (ChartLine("training", points, 0), held, ChartLine("none", [(1, None)], 2))))
    assert drawn == {
        "kind": "lines", "label": "Loss; last values: training: 0.3333, held-out: 2", "x": "step",
        "lines": [
            {"colour": 0, "held": False, "xs": [1, 2, 3], "ys": [5.0, None, 0.333333], "mean": None},
            {"colour": 1, "held": True, "xs": [0, 3], "ys": [7.0, 2.0], "mean": None},
        ],
    }  # fmt: skip


def test_a_curve_of_a_hundred_thousand_steps_is_small_and_loses_no_spike():
    points = [(step, math.sin(step / 999)) for step in range(100_000)]
    points[77_777] = (77_777, 90.0)
    drawn = drawing_of(LineChart("", (ChartLine("a", points, 0),)))
    (line,) = drawn["lines"]
    assert len(line["xs"]) == len(line["ys"]) <= 2000 and len(line["mean"]["xs"]) <= 600
    assert line["ys"][line["xs"].index(77_777)] == 90.0 and (line["xs"][0], line["xs"][-1]) == (0, 99_999)
    assert len(json.dumps(drawn)) < 60_000


def test_a_histogram_and_a_cloud():
    counts = (("chosen", (1, 2000)), ("rejected", (3, 0)))
    drawn = drawing_of(HistogramChart("Scores", (0.0, 0.5, 1.0), counts, "score"))
    assert drawn["label"] == "Scores: 2,001 chosen, 3 rejected" and drawn["edges"] == [0.0, 0.5, 1.0]
    assert [kind["counts"] for kind in drawn["kinds"]] == [[1, 2000], [3, 0]]
    assert drawn["kinds"][1]["shares"] == [100.0, 0.0]
    cloud = drawing_of(ScatterChart("", (("a", ((1.25, 1.0), (2.0, 3.0))), ("b", ())), "x", "y"))["clouds"]
    assert [(own["xs"], own["ys"]) for own in cloud] == [([1.25, 2], [1.0, 3.0]), ([], [])]


def test_the_best_is_a_point_of_its_line():
    held = ChartLine("held-out", [(0, 7.0), (3, 2.0), (6, 3.0)], 0, is_evaluation=True, best=3)
    [drawn] = drawing_of(LineChart("Loss", (held,)))["lines"]
    assert drawn["best"] == [3, 2.0]
    unknown = ChartLine("held-out", [(0, 7.0), (3, None), (6, 3.0)], 0, is_evaluation=True, best=3)
    assert "best" not in drawing_of(LineChart("Loss", (unknown,)))["lines"][0]


def test_two_values_are_words():
    held, one = ChartLine("held-out", [(0, 7.0), (1200, 2.0)], 0, is_evaluation=True), ChartLine("rate", [(1, 0.5)], 0)
    assert in_words(LineChart("", (held,))) == "held-out 7 before training, 2 after step 1,200"
    assert in_words(LineChart("", (one,))) == "0.5 after step 1"
    assert (
        in_words(LineChart("", (one, held))) == "rate 0.5 after step 1; held-out 7 before training, 2 after step 1,200"
    )
    longer = ChartLine("training", [(1, 1.0), (2, None), (3, 2.0)], 0)  # a curve with a gap, which its chart shows
    assert in_words(LineChart("", (held, longer))) == "" == in_words(LineChart("", ()))
    assert in_words(HistogramChart("", (0.0, 1.0), (("a", (1,)),), "")) == ""


def test_nothing_to_draw_is_no_drawing():
    assert drawing_of(LineChart("", (ChartLine("a", [(1, None)], 0),))) is None
    assert drawing_of(LineChart("", ())) is None
    assert drawing_of(HistogramChart("", (0.0, 1.0), (("a", (0,)),), "")) is None
    assert drawing_of(ScatterChart("", (("a", ()),), "", "")) is None
