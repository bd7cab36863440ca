"""Which ranked responses a report shows, and their scores in each run."""

from __future__ import annotations

import pytest

from tests.unit.utils.report.conftest import write_lines
from training.utils.report.judged import Change, judged_rows, judges, margins_along
from training.utils.report.reading import read_runs
from training.utils.report.samples_section import samples_section


def sample(step: int, index: int, chosen: float, rejected: float, **more) -> dict:
    return {
        "step": step, "uid": f"u{index}", "prompt": f"p{index}", "responses": ["good <b>", "bad"],
        "scores": [chosen, rejected], "margin": chosen - rejected, **more,
    }  # fmt: skip


@pytest.fixture
def pair_run(tmp_path):
    def make(name: str, samples: list, program: str = "training.step2_reward.main"):
        folder = tmp_path / name
        folder.mkdir()
        write_lines(folder / "samples.jsonl", samples)
        (folder / "config.yaml").write_text(f"program: {program}\n")
        return folder

    return make


def steps_of(*folders):
    return [step for run in read_runs(folders) for step in run.steps]


ROWS = [sample(0, index, 0.5, 0.25) for index in range(12)] + [sample(9, index, index, 8.0) for index in range(12)]


def test_the_worst_after_training_then_the_first_that_are_left(pair_run):
    (step,) = steps_of(pair_run("one", ROWS))
    rows = judged_rows([step])
    assert judges(step)
    assert [(row.why, row.prompt) for row in rows] == [
        *(("Judged worst after training", f"p{index}") for index in range(6)),
        *(("The first", f"p{index}") for index in range(6, 10)),
    ]
    assert rows[1].margins == (Change("one", 0.25, -7.0),)
    assert rows[1].responses == (
        ("chosen", "good <b>", (Change("one", 0.5, 1.0),)),
        ("rejected", "bad", (Change("one", 0.25, 8.0),)),
    )


def test_one_evaluation_and_ranked_responses(pair_run):
    three = {**sample(0, 1, 2.0, 1.0), "responses": ["a", "b", "c"], "scores": [2.0, 1.0, None]}
    (row,) = judged_rows(steps_of(pair_run("one", [three])))
    assert row.why == "Judged worst before training" and row.margins == (Change("one", 1.0, None),)
    assert [(label, own[0].before) for label, _, own in row.responses] == [
        ("ranked 1", 2.0), ("ranked 2", 1.0), ("ranked 3", None)
    ]  # fmt: skip


def test_several_runs_have_their_scores_beside_each_other(pair_run):
    other = [sample(step, index, step, 1.0) for step in (0, 4) for index in (11, 3)]
    rows = judged_rows(steps_of(pair_run("one", ROWS), pair_run("other", other)))
    assert [row.prompt for row in rows] == ["p3", "p11"]  # those that both have
    assert rows[0].margins == (Change("one", 0.25, -5.0), Change("other", -1.0, 3.0))


def test_evaluations_between_have_their_margins(pair_run):
    steps = steps_of(pair_run("one", [*ROWS[:12], sample(5, 0, 3.0, 1.0), *ROWS[12:]]))
    assert margins_along(steps[0])[0] == ("p0", [("step 0", 0.25), ("step 5", 2.0), ("step 9", -8.0)])
    assert "step 5 <b>2</b>" in samples_section(steps)


def test_the_section_escapes_and_colours(pair_run):
    html = samples_section(steps_of(pair_run("one", ROWS, "training.step2_dpo.main")))
    assert "good &lt;b&gt;" in html and "good <b>" not in html
    assert "<span>implicit reward <b>0.5 → 0</b></span>" in html
    assert '<span>margin <b class="bad">0.25 → -8</b></span>' in html and "below 0 the order is wrong" in html


@pytest.mark.parametrize("broken", [{"scores": 3}, {"responses": 4}, {"responses": [None, {}]}, {"margin": "x"}])
def test_what_is_not_as_expected_is_a_gap(pair_run, broken):
    assert samples_section(steps_of(pair_run("one", [*ROWS, {**sample(9, 50, 1.0, 2.0), **broken}])))
