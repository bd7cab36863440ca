"""Which ranked responses a report shows, and their scores in each run."""

from __future__ import annotations

from threestep.plugins.report.figures.ranked_samples import Change, has_ranked_samples, margins_along, ranked_samples
from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.tests.conftest import PAIRS as ROWS
from threestep.plugins.report.tests.conftest import pair_sample as sample


def steps_of(*folders):
    return [step for run in read_runs(folders) for step in run.steps]


def test_the_worst_after_training_then_the_first_that_are_left(pair_run):
    (step,) = steps_of(pair_run("one", ROWS))
    rows = ranked_samples([step])
    assert has_ranked_samples(step)
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
    (row,) = ranked_samples(steps_of(pair_run("one", [three])))
    assert row.why == "Judged worst before training" and row.margins == (Change("one", 1.0, None),)
    assert [(label, own[0].before) for label, _, own in row.responses] == [
        ("ranked 1", 2.0), ("ranked 2", 1.0), ("ranked 3", None)
    ]  # fmt: skip


def test_several_runs_have_their_scores_beside_each_other(pair_run):
    other = [sample(step, index, step, 1.0) for step in (0, 4) for index in (11, 3)]
    rows = ranked_samples(steps_of(pair_run("one", ROWS), pair_run("other", other)))
    assert [row.prompt for row in rows] == ["p3", "p11"]  # those that both have
    assert rows[0].margins == (Change("one", 0.25, -5.0), Change("other", -1.0, 3.0))


def test_evaluations_between_have_their_margins(pair_run):
    steps = steps_of(pair_run("one", [*ROWS[:12], sample(5, 0, 3.0, 1.0), *ROWS[12:]]))
    assert margins_along(steps[0])[0] == ("p0", (), [("step 0", 0.25), ("step 5", 2.0), ("step 9", -8.0)])
