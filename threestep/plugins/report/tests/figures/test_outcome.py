"""The best evaluation of a run, its headline figures, and whether it got worse."""

from __future__ import annotations

import json

import pytest

from threestep.plugins.report.figures.outcome import HeadlineFigure, best_step, headline, judged_course, worse_sentence
from threestep.plugins.report.figures.reading import read_runs

OVERFIT = ((0, 4.0, 0.1), (10, 2.0, 0.5), (20, 1.5, 0.6), (30, 1.9, 0.65))


@pytest.fixture
def step_of(tmp_path):
    """Makes a run's step of evaluations (step, loss, accuracy)."""

    def make(evaluations=OVERFIT, program="training.step1_sft.main", accuracy="token_accuracy", done=True, **settings):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        lines = [{"step": at, "eval/loss": loss, f"eval/{accuracy}": share} for at, loss, share in evaluations]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.yaml").write_text(json.dumps({"program": program, **settings}))
        (folder / "summary.json").unlink(missing_ok=True)
        if done:
            (folder / "summary.json").write_text('{"seconds": 1.0}')
        return read_runs([folder])[0].steps[0]

    return make


def test_the_best_step_is_beside_the_last(step_of):
    step = step_of()
    assert best_step(step) == 20
    assert headline(step) == [
        HeadlineFigure("SFT loss", 4.0, 1.9, None, "best: 1.5 after step 20", got_worse=True),
        HeadlineFigure("Token accuracy", 0.1, 0.65, None, "0.6 at the best loss, step 20"),
    ]
    assert worse_sentence(step).startswith(
        "the held-out loss was lowest after step 20 (1.5) and is 1.9 after step 30 (Token accuracy got better, 0.6 to "
        "0.65): further training made it worse; "
    )


def test_a_run_that_never_got_better(step_of):
    step = step_of([(0, 1.0, 0.5), (1, 2.0, 0.4), (2, 3.0, 0.3)])
    assert [figure.note for figure in headline(step)] == ["best before training", ""]
    assert worse_sentence(step).endswith(": training made it worse; lower the learning rate, or look at the rows")
    assert worse_sentence(step_of([(0, 1.0, 0.5), (1, 2.0, 0.4)])) != ""  # of two evaluations too


def test_the_model_of_the_best_step_has_its_figures(step_of):
    step = step_of(load_best_model_at_end=True)
    assert headline(step) == [
        HeadlineFigure("SFT loss", 4.0, 1.5, None, "of the best step, 20"),
        HeadlineFigure("Token accuracy", 0.1, 0.6, None, "of the best step, 20"),
    ]
    assert worse_sentence(step) == "" and worse_sentence(step_of(load_best_model_at_end=True, done=False)) != ""
    never_better = [(0, 1.0, 0.5), (1, 2.0, 0.4), (2, 3.0, 0.3)]  # the best is one after training
    assert judged_course(step_of(never_better, load_best_model_at_end=True)).last == (1, 2.0)


def test_a_run_is_judged_by_the_metric_that_it_names(step_of):
    step = step_of(metric_for_best_model="eval_token_accuracy")
    assert best_step(step) == 30 and worse_sentence(step) == ""
    step = step_of(metric_for_best_model="token_accuracy", greater_is_better=False)
    assert best_step(step) == 0


@pytest.mark.parametrize("program", ["training.step2_reward.main", "training.step2_dpo.main"])
def test_pairs_are_judged_by_their_loss(step_of, program):
    step = step_of(program=program, accuracy="accuracy")
    assert best_step(step) == 20 and headline(step)[0].note == "0.6 at the best loss, step 20"
    assert worse_sentence(step) == ""  # pairs are ranked better
    assert worse_sentence(step_of((*OVERFIT[:3], (30, 1.9, 0.6)), program, "accuracy")) != ""
    gap = {"training.step2_reward.main": "score_gap", "training.step2_dpo.main": "reward_margin"}[program]
    with open(step.path / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": at, f"eval/{gap}": 3.0 + at}) + "\n" for at in (20, 30))
    [step] = read_runs([step.path])[0].steps
    assert " got better, 23 to 33): further training made it worse; " in worse_sentence(step)
