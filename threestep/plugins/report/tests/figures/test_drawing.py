"""What the script draws are the numbers of the charts, as JSON."""

from __future__ import annotations

import json
import math

from threestep.plugins.report.figures.charts import ChartLine, HistogramChart, LineChart
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
