"""Charts and their drawings, samples and their pictures, the accounts of prompts and of gamed rewards."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from tests.support.image_readers import picture
from threestep.plugins.report.figures.charts import (
    ChartLine,
    HistogramChart,
    LineChart,
    histogram_of,
    running_mean,
    thinned,
)
from threestep.plugins.report.figures.drawing import drawing_of, in_words
from threestep.plugins.report.figures.figures import curves_of, phase_seconds
from threestep.plugins.report.figures.gaming_figures import gaming_of
from threestep.plugins.report.figures.numbers import duration, shown, shown_together, sparkline
from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.figures.rollout_account import NOT_DRAWN, WAITING, rollout_account
from threestep.plugins.report.figures.sample_media import media_shown, sample_media
from threestep.plugins.report.figures.tables import sampled_rows, settings_rows
from threestep.plugins.report.tests.conftest import write_lines
from training.step3_ppo.contracts.rollouts import RolloutEvents, RolloutsOfStep, Times
from training.utils.run.run_folder import LOGS, ROLLOUTS, RunLog, read_rollouts


def steps_of(*folders):
    return [step for run in read_runs(folders) for step in run.steps]


def test_curves_are_the_numbers_of_metrics_jsonl(sft_run, ppo_run):
    for folder in (sft_run(), ppo_run()):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        names = {name for line in lines for name in line}
        columns = [[(row["step"], row[name]) for row in lines if name in row] for name in names]
        found = [list(line.points) for chart in curves_of(steps_of(folder)) for line in chart.lines]
        assert found and all(points in columns for points in found)


def test_several_runs_share_a_chart_of_the_held_out_reward_and_no_curve_repeats_another(ppo_run):
    """With --kl_in loss, no penalty is in the reward, whose curve would be the score's."""
    runs = [ppo_run(name) for name in ("in_reward", "in_loss")]
    for folder, penalty in zip(runs, (0.5, 0.0), strict=True):
        with open(folder / "metrics.jsonl", "a") as file:
            scores = ((1, 1.1), (2, 1.9))
            file.writelines(json.dumps({"step": at, "rollout/reward": score - penalty}) + "\n" for at, score in scores)
    charts = {chart.title: chart for chart in curves_of([step for folder in runs for step in steps_of(folder)])}
    shown = {title: [line.label for line in chart.lines] for title, chart in charts.items() if "Reward" in title}
    both = ["in_reward", "in_loss"]
    assert shown == {
        "Reward: held-out prompts": both, "Reward: rollouts": both, "Reward: with the KL penalty": both[:1]
    }  # fmt: skip
    assert all(line.is_evaluation for line in charts["Reward: held-out prompts"].lines)
    [alone] = [chart for chart in curves_of(steps_of(runs[1])) if chart.title == "Reward"]
    assert [line.label for line in alone.lines] == ["rollouts", "held-out prompts"]


def test_a_figure_that_never_changes_is_a_sentence(sft_run):
    def words(*values: float | None) -> str:
        points = tuple(enumerate(values))
        return in_words(LineChart("Clip fraction", (ChartLine("actor", points, 0), ChartLine("critic", points, 1))))

    assert words(0.0, 0.0, 0.0) == "0 throughout" and words(0.0, 0.0, 0.5) == words(0.0, None, 0.0) == ""


def test_two_evaluations_of_several_runs_are_curves():
    def drawn(*lines: ChartLine) -> bool:
        return not in_words(LineChart("Reward: held-out prompts", lines))

    points = ((0, 1.0), (20, 2.0))
    one, other = (ChartLine(label, points, place, is_evaluation=True) for place, label in enumerate("ab"))
    assert drawn(one, other) and not drawn(one) and not drawn(one, ChartLine("c", points[:1], 2, is_evaluation=True))


def test_a_folder_of_its_own_is_no_difference(sft_run):
    steps = [*steps_of(sft_run("a", output_dir="a")), *steps_of(sft_run("b", output_dir="b", seed=2))]
    differ, same = settings_rows(steps)
    assert differ == [("seed", ["1", "2"])] and "output_dir" not in dict(same)
    assert ("output_dir", ["a"]) in settings_rows(steps[:1])[1]


def test_rollouts_ahead_show_who_waited_for_whom(ppo_run):
    """The first of two ranks that began and the last that ended. Rollouts that a checkpoint had have no times."""
    folder = ppo_run()
    own = {"prompts": 8, "first": 0, "rows": [], "left_out": {}}
    lines = [
        {**own, "step": 1, "began": [10.0, 11.0], "ended": [12.0, 14.0], "trained": 15.5},
        {**own, "step": 2, "trained": 16.0},
        {**own, "step": 3, "began": [14.0, 14.5], "ended": [17.0, 16.0], "trained": 18.0},
    ]
    assert not [chart for chart in curves_of(steps_of(folder)) if chart.title == "Drawn ahead"]
    write_lines(folder / "rollouts.jsonl", lines)
    (chart,) = [chart for chart in curves_of(steps_of(folder)) if chart.title == "Drawn ahead"]
    assert {line.label: list(line.points) for line in chart.lines} == {
        "drawing began": [(1, 0.0), (3, 4.0)], "drawing ended": [(1, 4.0), (3, 7.0)], "trained": [(1, 5.5), (3, 8.0)]
    }  # fmt: skip


def test_time_goes_to_phases_and_the_rest_to_what_a_line_tells(ppo_run, sft_run, tmp_path):
    # evaluation: 2 s before step 0, 1 s at the end. Steps: 3 s and 4 s, of which 3 s rollouts and 3.5 s learning.
    phases = [("evaluation", 3.0), ("rollout", 3.0), ("learn", 3.5), ("other", 0.5)]
    assert phase_seconds(*steps_of(ppo_run())) == (phases, 10.0)
    # 1 s, then steps that end at 2, 3 and 4 s, then 6 s
    assert phase_seconds(*steps_of(sft_run())) == ([("evaluation", 7.0), ("training", 3.0)], 10.0)
    # Phases that lie inside others take no time twice.
    line = {"step": 1, "seconds": 4.0, "time/rollout": 3.0, "time/1_generate": 2.0, "rollout/score": 1.0}
    line["time_per_token_ms/1_generate"] = 90.0  # no seconds
    write_lines(tmp_path / "metrics.jsonl", [line])
    assert phase_seconds(*steps_of(tmp_path)) == ([("rollout", 3.0), ("generate", 2.0)], 4.0)
    line |= {"time/2_score": 0.01, "time/checkpoint": 0.005}  # too short to be seen
    write_lines(tmp_path / "metrics.jsonl", [line])
    assert phase_seconds(*steps_of(tmp_path)) == ([("rollout", 3.0), ("generate", 2.0), ("other", 0.015)], 4.0)


def test_the_mean_is_over_the_values_around():
    points = [(1, 1.0), (2, 2.0), (3, None), (4, 6.0), (5, 4.0)]
    # at the ends the window has fewer values; the gap is no value
    assert running_mean(points, 3) == [(1, 1.5), (2, 3.0), (4, 4.0), (5, 5.0)]
    assert running_mean(points, 1) == [(1, 1.0), (2, 2.0), (4, 6.0), (5, 4.0)]


def test_thinning_loses_no_spike_and_no_end():
    points = [(step, math.sin(step / 50)) for step in range(10_000)]
    points[777], points[5000], points[3000] = (777, 90.0), (5000, -90.0), (3000, None)
    kept = thinned(points, 800)
    assert len(kept) <= 800 and set(kept) <= set(points) and kept == sorted(kept)
    assert {points[0], points[777], points[5000], points[-1]} <= set(kept)
    assert thinned(points[:10], 10) == points[:10]
    assert thinned([(step, None) for step in range(100)], 10)[0] == (0, None)


def test_a_histogram_counts_each_value_once():
    edges, counts = histogram_of([("a", [0.0, 0.1, 1.0]), ("b", [0.5])], bins=4)
    assert edges == pytest.approx((0.0, 0.25, 0.5, 0.75, 1.0))
    assert counts == [("a", (2, 0, 0, 1)), ("b", (0, 0, 1, 0))]  # 1, the greatest, is in the last
    edges, counts = histogram_of([("a", [3.0, 3.0])], bins=2)
    assert edges == (2.5, 3.0, 3.5) and sum(counts[0][1]) == 2


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
    longer = ChartLine("training", [(1, 1.0), (2, None), (3, 2.0)], 0)  # a curve with a gap, which its chart shows
    of_held, of_one = "held-out 7 before training, 2 after step 1,200", "rate 0.5 after step 1"
    for lines, words in (
        ((held,), of_held), ((one,), "0.5 after step 1"), ((one, held), f"{of_one}; {of_held}"), ((held, longer), ""),
        ((), ""),
    ):  # fmt: skip
        assert in_words(LineChart("", lines)) == words
    assert in_words(HistogramChart("", (0.0, 1.0), (("a", (1,)),), "")) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.5, "0.5"), (0.12345, "0.1235"), (12.3456, "12.35"), (1234.5, "1,234"), (-2.0, "-2"), (None, "–"),
     (1e-5, "1e-5"), (1.25e7, "1.25e7"), (999.96, "1000"), (100.0, "100")],
)  # fmt: skip
def test_numbers_as_people_read_them(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (0.89, 0.8725, ("0.890", "0.873")), (284.6123, 9.5, ("285", "10")), (4.5, 2.4, ("4.50", "2.40")),
        (0.0, 0.05, ("0.0000", "0.0500")), (1234.5, 2.0, ("1,234", "2")), (0.5, None, ("0.500", "–")),
        (None, None, ("–", "–")),
    ],
)  # fmt: skip
def test_two_numbers_to_compare_have_the_same_decimals(before, after, expected):
    assert shown_together(before, after) == expected


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
    assert "nan" not in svg and "inf" not in svg and sparkline(points[:1]) == ""
    ElementTree.fromstring(svg)


def test_samples_stand_side_by_side(ppo_run):
    gains = [0, 0, 0, 0, 3, -2, 0, 5, -4]
    samples = [
        {"step": step, "uid": str(index), "prompt": f"p{index}", "response": f"r{step}",
         "reward": 1.0 + (gain if step else 0), "ended": not step or index != 0}
        for step in (0, 7) for index, gain in enumerate(gains)
    ]  # fmt: skip
    rows = sampled_rows(steps_of(ppo_run(samples=samples)))
    assert [(row.why, row.prompt) for row in rows] == [
        *(("First held-out rows", f"p{index}") for index in range(4)),
        ("Reward rose most", "p7"), ("Reward rose most", "p4"), ("Reward fell most", "p8"), ("Reward fell most", "p5"),
    ]  # fmt: skip
    assert [(answer.column, answer.text, answer.marks[0]) for answer in rows[4].answers] == [
        ("before", "r0", ("reward", 1.0)), ("after", "r7", ("reward", 6.0))
    ]  # fmt: skip
    assert [answer.ended for answer in rows[0].answers] == [True, False]


# --- pictures of samples

NAME = "0123456789abcdef" * 4


@pytest.fixture
def pictured(tmp_path):
    kept = tmp_path / "sample_pictures"
    kept.mkdir()
    (kept / f"{NAME}.png").write_bytes(picture(4, 4))
    (kept / f"{'a' * 64}.png").symlink_to(kept / f"{NAME}.png")
    (kept / f"{'b' * 64}.png").write_bytes(bytes(2**17 + 1))
    return tmp_path


def test_the_page_holds_the_pictures(pictured):
    (uri,) = sample_media(pictured, {"images": [NAME]})
    assert uri.startswith("data:image/png;base64,iVBOR")
    assert media_shown((uri, uri)) == (
        f'<div class="pictures"><img src="{uri}" alt="image 1 of 2"><img src="{uri}" alt="image 2 of 2"></div>'
    )
    assert sample_media(pictured, {}) == sample_media(pictured, {"images": "0123"}) == () and media_shown(()) == ""
    assert media_shown((None,)) == '<div class="pictures"><span class="soft">1 image not shown</span></div>'


@pytest.mark.parametrize(
    "name", ["../sample_pictures/" + NAME, "f" * 64, f"{NAME}.png", "", 3, None, {"a": 1}, "a" * 64, "b" * 64]
)
def test_a_name_that_is_none_of_the_folder_a_link_and_a_large_file_are_counted_alone(pictured, name):
    assert sample_media(pictured, {"images": [name]}) == (None,)


# --- the account of a run's prompts: what was lost and what was taken twice


def epoch(first: int, rows: list[int], **left_out: list[int]) -> dict:
    return {"step": first // 2 + 1, "version": 0, "first": first, "prompts": 3, "rows": rows, "left_out": left_out}


def groups(positions: list[int], pending: list[int], rows: list[int] | None = None) -> dict:
    line = {"step": 1, "prompts": 4, "positions": positions, "versions": [0] * len(positions), "pending": pending}
    return {**line, "rows": rows or positions, "left_out": {}}


ENDED = {"step": 2, "version": 0, "first": 2, "prompts": 3, "unused": "it ended"}
ENDED_GROUPS = {"step": 1, "prompts": 4, "positions": [1, 2], "unused": "it ended"}


@pytest.mark.parametrize(
    ("lines", "learned", "left_out", "lost", "twice", "words"),
    [
        ([], None, None, None, None, ""),
        ([epoch(0, [2, 0]), epoch(2, [1, 0], cut=[1]), epoch(4, [2, 1])], 2, {"cut": 1}, [], [],
         "epoch 1: 2 of 3 prompts were each trained on once; 1 were not: cut"),
        ([epoch(0, [2, 0]), ENDED], 2, {"it ended": 1}, [], [], ""),
        ([epoch(0, [2, 0])], 2, {NOT_DRAWN: 1}, [], [], f"1 were {NOT_DRAWN}"),
        ([epoch(0, [2, 0]), epoch(4, [2, 1])], 2, {}, [2], [], "LOST: 1 (positions 2)"),
        ([epoch(0, [2, 0]), epoch(2, [2])], None, None, [], [2], "TWICE: 1 (rows 2)"),
        ([epoch(0, [2, 0]), epoch(0, [2, 0])], None, None, [], [0, 2], ""),
        ([groups([0, 3], [1, 2])], 2, {WAITING: 2}, [], [], "2 are drawn, or being"),
        ([groups([0, 3], [1, 2]), groups([1, 2], [])], 4, {}, [], [], ""),
        ([groups([0, 3], [1]), groups([1], [])], 3, {}, [2], [], ""),
        ([groups([0, 3], [1, 2]), groups([1], [])], 3, {}, [2], [], ""),  # it waited once, and no longer does
        ([groups([0, 3], [1, 2]), groups([1, 2], [], [1, 0])], None, None, [], [0], ""),
        ([groups([0, 3], [1, 2]), ENDED_GROUPS], 2, {"it ended": 2}, [], [], ""),
    ],
)  # fmt: skip
def test_each_prompt_was_learned_from_once_or_has_a_reason(lines, learned, left_out, lost, twice, words):
    if not lines:
        assert rollout_account(lines) == []
        return
    first, *others = rollout_account(lines)
    assert (first.lost, first.twice, first.is_whole) == (lost, twice, not lost and not twice)
    assert learned in (None, first.learned) and left_out in (None, dict(first.left_out)) and words in first.sentence()
    assert [(each.learned, dict(each.left_out)) for each in others if each.is_whole] == [(3, {})] * (len(lines) == 3)


def test_the_log_that_a_run_writes_is_accounted_for_and_whole_lines_are_read(tmp_path):
    assert read_rollouts(tmp_path) == [] and ROLLOUTS in LOGS  # it is cut with the others when a run resumes
    events = RolloutEvents(RunLog(tmp_path / ROLLOUTS), "hf", prompts=4, per_step=2)
    events.trained(RolloutsOfStep(1, 0, (), (), 0.5, Times(1.0, 2.0, 3.0)), [(3, None), (1, "cut")])
    events.trained(RolloutsOfStep(2, 0, (), ()), [(0, None), (2, None)])
    events.unused([(3, 1)], "the run ended")
    (account,) = rollout_account(read_rollouts(tmp_path))
    assert account.is_whole and account.learned == 3
    (tmp_path / ROLLOUTS).write_text(f'{json.dumps(epoch(0, [1]))}\n{{"other": 1}}\n[]\n{{"step": 1, ')
    assert [line["rows"] for line in read_rollouts(tmp_path)] == [[1]]


# --- the account of a gamed reward, and its curve against the KL


@pytest.fixture
def figures_of(ppo_run):
    def make(kls: list[float], evaluations: dict[int, tuple[float, float]], settings: str = "checker: gsm8k\n"):
        folder = ppo_run(
            samples=[
                {"step": step, "prompt_index": index, "sample": 0, "prompt": "p", "response": "r " * (index + step),
                 "response_tokens": index + step, "reward": index + step, "check": 1.0 - 0.25 * (step > 0)}
                for step in (0, 4) for index in range(40)
            ]
        )  # fmt: skip
        lines = [{"step": step, "rollout/kl": kl} for step, kl in enumerate(kls, start=1)]
        lines += [{"step": at, "eval/reward": one, "eval/check": check} for at, (one, check) in evaluations.items()]
        write_lines(folder / "metrics.jsonl", sorted(lines, key=lambda line: line["step"]))
        (folder / "config.yaml").write_text(f"program: training.step3_ppo.main\nreward: model\n{settings}")
        return gaming_of(read_runs([folder])[0].steps[0])

    return make


def test_the_curve_stands_over_the_square_root_of_the_next_rollouts_kl(figures_of):
    """The weights after step 2 drew rollout 3; after the last rollout its own KL stands."""
    found = figures_of([0.0, 0.04, 0.16, 0.25], {0: (1.0, 0.5), 2: (3.0, 0.75), 4: (5.0, 0.25)})
    score, check = found.curve.lines
    assert [x for x, _ in score.points] == pytest.approx([0.0, 0.4, 0.5]) and found.kl == 0.25
    deviation = found.account.score.deviation
    assert [y for _, y in score.points] == pytest.approx([0.0, 2.0 / deviation, 4.0 / deviation])
    assert (score.label, check.label, check.is_evaluation) == ("score", "checker, held out", True)
    assert "square root of the KL" in found.curve.x_label
    assert any("while checker, which is not trained on, fell by 0.25" in sign for sign in found.signs)


def test_a_kl_that_is_not_monotonic_or_below_0(figures_of):
    found = figures_of([-0.01, 0.3, 0.2, 0.1], {0: (1.0, 0.5), 1: (2.0, 0.5), 4: (3.0, 0.5)})
    assert [x for x, _ in found.curve.lines[0].points] == pytest.approx([0.0, math.sqrt(0.1), math.sqrt(0.3)])


def test_without_a_reference_it_stands_over_the_steps(figures_of):
    found = figures_of([], {0: (1.0, 0.5), 2: (2.0, 0.5), 4: (3.0, 0.5)}, "")
    assert found.kl is None and found.curve.x_label == "step"
    assert [line.label for line in found.curve.lines] == ["score"]
    assert [x for x, _ in found.curve.lines[0].points] == [0.0, 2.0, 4.0]
    assert found.signs and found.signs[0].endswith("and no held-out value checks it")


def test_two_evaluations_are_no_curve_and_other_steps_have_none(figures_of, sft_run):
    assert figures_of([0.0], {0: (1.0, 0.5), 4: (5.0, 0.25)}, "").curve is None
    assert gaming_of(read_runs([sft_run()])[0].steps[0]) is None
