"""The charts hold the numbers of the files."""

from __future__ import annotations

import json

from threestep.plugins.report.figures.figures import (
    curves_of,
    phase_seconds,
)
from threestep.plugins.report.figures.reading import read_runs


def steps_of(*folders):
    return [step for run in read_runs(folders) for step in run.steps]


def test_curves_are_the_numbers_of_metrics_jsonl(sft_run, ppo_run):
    for folder in (sft_run(), ppo_run()):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        charts = curves_of(steps_of(folder))
        assert charts
        names = {name for line in lines for name in line}
        for chart in charts:
            for line in chart.lines:
                columns = [[(row["step"], row[name]) for row in lines if name in row] for name in names]
                assert list(line.points) in columns


def test_rollouts_ahead_show_who_waited_for_whom(ppo_run):
    """The first of two ranks that began and the last that ended. Rollouts that a checkpoint had have no times."""
    folder = ppo_run()
    lines = [
        {"step": 1, "prompts": 8, "began": [10.0, 11.0], "ended": [12.0, 14.0], "trained": 15.5},
        {"step": 2, "prompts": 8, "trained": 16.0},
        {"step": 3, "prompts": 8, "began": [14.0, 14.5], "ended": [17.0, 16.0], "trained": 18.0},
    ]
    assert not [chart for chart in curves_of(steps_of(folder)) if chart.title == "Drawn ahead"]
    (folder / "rollouts.jsonl").write_text(
        "".join(json.dumps({**line, "first": 0, "rows": [], "left_out": {}}) + "\n" for line in lines)
    )
    (chart,) = [chart for chart in curves_of(steps_of(folder)) if chart.title == "Drawn ahead"]
    assert {line.label: list(line.points) for line in chart.lines} == {
        "drawing began": [(1, 0.0), (3, 4.0)], "drawing ended": [(1, 4.0), (3, 7.0)], "trained": [(1, 5.5), (3, 8.0)]
    }  # fmt: skip


def test_time_goes_to_phases_and_the_rest_to_what_a_line_tells(ppo_run, sft_run):
    # evaluation: 2 s before step 0, 1 s at the end. Steps: 3 s and 4 s, of which 3 s rollouts and 3.5 s learning.
    phases, total = phase_seconds(*steps_of(ppo_run()))
    assert total == 10.0
    assert phases == [("evaluation", 3.0), ("rollout", 3.0), ("learn", 3.5), ("the rest", 0.5)]
    # 1 s, then steps that end at 2, 3 and 4 s, then 6 s
    assert phase_seconds(*steps_of(sft_run())) == ([("evaluation", 7.0), ("training", 3.0)], 10.0)


def test_phases_that_lie_inside_others_take_no_time_twice(tmp_path):
    line = {"step": 1, "seconds": 4.0, "time/rollout": 3.0, "time/1_generate": 2.0, "rollout/score": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    assert phase_seconds(*steps_of(tmp_path)) == ([("rollout", 3.0), ("1 generate", 2.0)], 4.0)
