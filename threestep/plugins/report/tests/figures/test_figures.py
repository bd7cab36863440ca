"""The charts hold the numbers of the files."""

from __future__ import annotations

import json

import pytest

from threestep.plugins.report.figures.figures import (
    curves_of,
    phase_name,
    phase_seconds,
    sample_charts,
    score_charts,
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


def test_training_and_evaluation_share_a_chart(sft_run):
    loss = curves_of(steps_of(sft_run()))[0]
    assert loss.title == "Loss"
    assert [(line.label, line.colour, line.is_evaluation) for line in loss.lines] == [
        ("training", 0, False), ("held-out", 1, True)
    ]  # fmt: skip
    assert list(loss.lines[1].points) == [(0, 4.5), (3, 2.4)]


def test_runs_share_a_chart_and_have_a_colour_each(sft_run, ppo_run):
    loss = curves_of(steps_of(sft_run("a"), sft_run("b", losses=(9.0,))))[0]
    assert [(line.label, line.colour) for line in loss.lines] == [
        ("a: training", 0), ("a: held-out", 0), ("b: training", 1), ("b: held-out", 1)
    ]  # fmt: skip
    titles = [chart.title for chart in curves_of(steps_of(ppo_run("c"), ppo_run("d")))]
    assert "Learning rate: actor" in titles and "Learning rate: critic" in titles  # colours cannot tell both apart
    assert "Learning rate" in [chart.title for chart in curves_of(steps_of(ppo_run("e")))]


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


def test_rollout_servers_show_which_was_waited_for(ppo_run):
    folder = ppo_run()
    a, b = "http://a:1", "http://b:1"
    slowest = [{a: 1.0, b: 3.0}, {}, {b: 2.0}, {a: 5.0, b: 2.5}, {a: 1.0, b: 4.0}]
    lines = [
        {"step": step, "first": 0, "prompts": 8, "rows": [], "left_out": {}}
        | ({"servers": {name: {"responses": 2, "seconds": 9.0, "slowest": own} for name, own in each.items()}})
        for step, each in enumerate(slowest, start=1)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (chart,) = [chart for chart in curves_of(steps_of(folder)) if chart.title == "Rollout servers"]
    assert {line.label: list(line.points) for line in chart.lines} == {
        f"{b}, last in 2 of 3 steps": [(1, 3.0), (3, 2.0), (4, 2.5), (5, 4.0)],
        f"{a}, last in 1 of 3 steps": [(1, 1.0), (4, 5.0), (5, 1.0)],
    }
    many = {f"http://{place}:1": {"responses": 1, "seconds": 1.0, "slowest": float(place)} for place in range(1, 11)}
    (folder / "rollouts.jsonl").write_text(json.dumps({**lines[0], "servers": many}) + "\n")
    (chart,) = [chart for chart in curves_of(steps_of(folder)) if chart.title == "Rollout servers"]
    assert [line.label.partition(",")[0] for line in chart.lines] == [f"http://{place}:1" for place in range(10, 2, -1)]
    assert chart.note.endswith("; 8 of 10 servers, the slowest")


def test_scores_of_chosen_and_rejected(sft_run):
    folder = sft_run()
    bins = {"edges": [-1.0, 0.0, 1.0], "chosen": [1, 3], "rejected": [4, 0]}
    strange = {"edges": [0.0, None], "chosen": [1], "rejected": [1]}
    for before, drawn in ((bins, 2), (strange, 1), ({"edges": []}, 1), ("text", 1)):
        report = {"evaluation": {"histogram": bins}, "before": {"histogram": before}}
        (folder / "reward_report.json").write_text(json.dumps(report))
        charts = score_charts(*steps_of(folder))
        assert len(charts) == drawn
        assert charts[-1].counts == (("chosen", (1, 3)), ("rejected", (4, 0)))
    (folder / "reward_report.json").write_text('{"evaluation": null}')
    assert score_charts(*steps_of(folder)) == []


def test_rewards_and_lengths_before_and_after(ppo_run):
    (step,) = steps_of(ppo_run())
    rewards, lengths = sample_charts(step)
    assert [(label, sum(counts)) for label, counts in rewards.counts] == [("SFT", 8), ("PPO", 8)]
    label, cloud = lengths.clouds[0]
    assert label == "SFT" and len(cloud) == 8
    assert all(
        abs(x - (3 + index)) < 0.36 and y == pytest.approx(1 + 0.1 * index) for index, (x, y) in enumerate(cloud)
    )
    assert "SFT +1.00, PPO +1.00" in lengths.note  # the reward rises by 0.1 a token


def test_samples_without_numbers_are_left_out(ppo_run):
    samples = [{"prompt": "a", "reward": None}, {"prompt": "b", "reward": 1.0, "response_tokens": 2}]
    (step,) = steps_of(ppo_run("one", samples))
    rewards, lengths = sample_charts(step)
    assert [sum(counts) for _, counts in rewards.counts] == [1]
    assert "SFT –" in lengths.note
    assert [name for name, _ in step.samples] == ["SFT"]
    assert sample_charts(*steps_of(ppo_run("none", [{"prompt": "a"}]))) == []


def test_time_goes_to_phases_and_the_rest_to_what_a_line_tells(ppo_run, sft_run):
    # evaluation: 2 s before step 0, 1 s at the end. Steps: 3 s and 4 s, of which 3 s rollouts and 3.5 s learning.
    phases, total = phase_seconds(*steps_of(ppo_run()))
    assert total == 10.0
    assert phases == [("evaluation", 3.0), ("rollout", 3.0), ("learn", 3.5), ("the rest", 0.5)]
    # 1 s, then steps that end at 2, 3 and 4 s, then 6 s
    assert phase_seconds(*steps_of(sft_run())) == ([("evaluation", 7.0), ("training", 3.0)], 10.0)


@pytest.mark.parametrize(
    ("metric", "phase"),
    [("time/1_rollout", "1 rollout"), ("time/learn", "learn"), ("time_score_seconds", "score"),
     ("profile/time_log_probs_seconds", "log probs"), ("train/loss", None), ("runtime/x", None), ("eval/time", None)],
)  # fmt: skip
def test_phases_are_known_by_their_names(metric, phase):
    assert phase_name(metric) == phase


def test_phases_that_lie_inside_others_take_no_time_twice(tmp_path):
    line = {"step": 1, "seconds": 4.0, "time/rollout": 3.0, "time/1_generate": 2.0, "rollout/score": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    assert phase_seconds(*steps_of(tmp_path)) == ([("rollout", 3.0), ("1 generate", 2.0)], 4.0)
