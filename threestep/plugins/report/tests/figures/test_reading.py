"""What is in a run's folder is read, what is not there is empty, what cannot be read is said; what came of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from tests.unit.utils.run import test_divergence as divergence
from threestep.plugins.report.figures.course import course_of
from threestep.plugins.report.figures.outcome import (
    HeadlineFigure,
    best_step,
    fallen_sentence,
    headline,
    judged_course,
    worse_sentence,
)
from threestep.plugins.report.figures.overview import changed_settings, facts_of
from threestep.plugins.report.figures.reading import RunReader, finite, read_runs, short_names
from threestep.plugins.report.pages.page import parts_of
from threestep.plugins.report.tests.conftest import write_lines
from threestep.plugins.report.writing import worse_at_end
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import defaults_of
from training.utils.flags.step import known_steps
from training.utils.run.run_folder import DIVERGENCE


def only_step(folder):
    (run,) = read_runs([folder])
    (step,) = run.steps
    return step


def test_one_step(sft_run):
    folder = sft_run(batch=8)
    step = only_step(folder)
    assert (step.run, step.declaration.kind) == ("sft", "sft")
    assert step.points("train/loss") == [(1, 4.0), (2, 3.0), (3, 2.5)]
    assert step.settings == {"seed": 1, "neftune_alpha": 0.0, "learning_rate": 0.1, "batch": 8}
    assert step.summary["eval_loss_after"] == 2.4
    assert step.reports.data_report["train"]["truncated"] == 4
    assert step.problems == () and not {"step", "seconds"} & set(step.names)
    assert len(read_runs([folder, f"{folder}/", folder / "."])) == 1  # the same folder counts once


def test_a_run_of_several_steps_in_their_order(tmp_path, sft_run, ppo_run):
    sft_run("all/z_first"), ppo_run("all/a_last")
    (tmp_path / "all" / "configs").mkdir()
    (tmp_path / "all" / "summary.json").write_text('{"seconds_sft": 20.0}')
    (run,) = read_runs([tmp_path / "all"])
    assert [step.declaration.kind for step in run.steps] == ["sft", "ppo"]
    assert run.summary == {"seconds_sft": 20.0}


def test_samples_are_those_of_the_first_and_the_last_step(ppo_run):
    folder = ppo_run()
    with open(folder / "samples.jsonl", "a") as file:
        file.write('{"step": 20, "greedy": true}\n')  # beside the sampled ones
    found = [(label, [sample["step"] for sample in samples]) for label, samples in only_step(folder).samples]
    assert found == [("before", [0] * 8), ("after", [20] * 8)]


def test_of_many_evaluations_some_are_kept_and_the_last_one(ppo_run):
    samples = [{"step": step, "prompt": f"p{place}"} for step in range(100) for place in range(5)]
    step = only_step(ppo_run("many", samples))
    kept = list(dict.fromkeys(sample["step"] for sample in step.first_prompts))
    assert kept[0] == 0 and kept[-1] == 99 and 6 <= len(kept) <= 15
    assert len(step.first_prompts) == 3 * len(kept)
    assert [len(samples) for _, samples in step.samples] == [5, 5]


def test_what_is_missing_is_empty(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\nbeta: 0.1\n")
    step = only_step(tmp_path)
    assert step.declaration.kind == "dpo"  # by its flag, as it has no metrics yet
    assert (step.lines, step.samples, step.summary, step.reports.data_report, step.problems) == ([], [], {}, {}, ())


def test_what_cannot_be_read_is_said(sft_run):
    folder = sft_run()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('[1]\n\n{"seconds": 1}\n{"step": 4, "train/lo')  # no object, empty, without a step, torn
    (folder / "samples.jsonl").write_bytes(b'{"prompt": "\xff"}\n')  # no UTF-8: readable all the same
    (folder / "config.yaml").write_text("a: [")
    (folder / "summary.json").write_text("[]")
    step, both = only_step(folder), ("config.yaml could not be read", "summary.json could not be read")
    assert step.points("train/loss") == [(1, 4.0), (2, 3.0), (3, 2.5)] and len(step.samples) == 1
    assert step.problems == ("metrics.jsonl: 2 lines could not be read", *both)
    # Nor are settings that take memory.
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (folder / "config.yaml").write_text("\n".join(["a0: &a0 [1]", *lines]))
    (folder / "summary.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert only_step(folder).problems[1:] == both


def test_numbers_that_are_none_are_gaps(tmp_path):
    line = '{"step": 1, "a": NaN, "b": null, "c": Infinity, "d": "4", "e": true, "f": 1e308, "g": 5, "h": 1'
    (tmp_path / "metrics.jsonl").write_text(line + "0" * 400 + "}")
    step = only_step(tmp_path)
    assert {name: step.points(name)[0][1] for name in "abcdefgh"} == {**dict.fromkeys("abcdefh"), "g": 5.0}
    assert [finite(value) for value in (1, -0.5, "1", None, True)] == [1.0, -0.5, None, None, None]


def test_names_tell_runs_apart():
    paths = [Path("/w/a/step1"), Path("/w/b/step1"), Path("/w/b/step3")]
    assert short_names(paths) == ["a/step1", "b/step1", "b/step3"]
    assert short_names([Path("/w/a"), Path("/w/b")]) == ["a", "b"]
    assert short_names([Path("/")]) == ["/"]


def test_no_folder_and_no_run_are_mistakes(tmp_path):
    with pytest.raises(ThreestepError, match=r"expected a run's folder \(its --output_dir\), but .*/gone is not"):
        read_runs([tmp_path / "gone"])
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(
        ThreestepError, match="contains no run: .* contains any of metrics.jsonl, config.yaml, samples.jsonl"
    ):
        read_runs([tmp_path])


def test_a_run_that_grows_is_read_on_and_one_that_begins_anew_is_read_anew(sft_run):
    folder = sft_run()
    reader = RunReader([folder])

    def steps() -> list[float]:
        ((step,),) = [run.steps for run in reader.read()]
        return [line["step"] for line in step.lines]

    assert steps() == [0, 1, 2, 3, 3]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4}\n{"step"')
    assert steps() == [0, 1, 2, 3, 3, 4]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(": 5}\n")  # the rest of the torn line
    assert steps() == [0, 1, 2, 3, 3, 4, 5] and reader.read()[0].steps[0].problems == ()
    whole = (folder / "metrics.jsonl").read_text()
    with open(folder / "metrics.jsonl", "r+") as file:  # a resumed run cuts its log, and writes on
        file.truncate(whole.index('{"step": 4}'))
        file.seek(0, 2)
        file.write('{"step": 104}\n{"step": 105}\n{"step": 106}\n')
    assert steps() == [0, 1, 2, 3, 3, 104, 105, 106]
    (folder / "metrics.jsonl").unlink()
    assert steps() == []


def test_a_sign_of_divergence_is_a_problem_of_its_step(tmp_path):
    divergence.run(tmp_path, len(divergence.LOSSES))
    noted = json.loads((tmp_path / DIVERGENCE).read_text())
    assert only_step(tmp_path).problems == (f"step {noted['step']}: {noted['sentence']}",)


# --- what was run, on what, with which settings


def with_settings(folder, **changed):
    sft = known_steps()["step1_sft"]
    settings = {**defaults_of(sft.groups), "program": sft.program, **changed}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return read_runs([folder])[0]


def test_facts_hold_no_paths_of_the_machine(sft_run):
    folder = sft_run()
    environment = {"device": "1 rank on cpu", "started": "2026-01-02 03:04", "versions": {"torch": "2.13.0"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    changed = {"model_name_or_path": "/home/me/start", "data_path": ["jsonl:/home/me/rows.jsonl", "org/name"]}
    assert facts_of(with_settings(folder, **changed)) == [
        ("Model", "start"), ("Data", "jsonl:rows.jsonl, org/name"), ("Rows", "90 training, 90 held out"),
        ("Device", "1 rank on cpu"), ("Duration", "10.0 s (SFT 3 steps)"), ("Started", "2026-01-02 03:04"),
        ("Versions", "torch 2.13.0"),
    ]  # fmt: skip


def test_only_settings_that_are_not_defaults(sft_run):
    changed = {"learning_rate": 0.25, "seed": 7, "padded": True, "output_dir": "x", "dataset_module": []}
    (step,) = with_settings(sft_run(), **changed).steps
    found = {name: (value, default) for name, value, default in changed_settings(step)}
    assert found.keys() == {"learning_rate", "seed", "padded"}
    assert found["padded"] == ("true", "false") and found["learning_rate"][0] == "0.25"


# --- the best evaluation of a run, its headline figures, and whether it got worse


def test_best_is_the_first_of_the_best_and_what_is_not_finite_does_not_count():
    points = [(0, 3.0), (1, None), (2, 1.0), (3, math.nan), (4, 1.0), (5, 2.0), (6, math.inf)]
    course = course_of("eval/loss", points)
    assert (course.first, course.best, course.last) == ((0, 3.0), (2, 1.0), (5, 2.0))
    assert course_of("eval/accuracy", points).best == (0, 3.0)
    assert course_of("eval/loss", [(0, None)]) is None


@pytest.mark.parametrize(
    ("first", "best", "last", "lost"),
    [
        (4.5, 2.0, 2.03, False),
        (4.5, 2.0, 2.05, True),
        (6.0, 0.01, 0.05, False),  # five times the best, and within 1 % of what was gained
        (6.0, 0.01, 0.1, True),
        (2.01, 2.0, 2.03, False),  # more than it gained, and within 2 % of the best
        (2.01, 2.0, 2.05, True),
        (4.5, 2.0, 2.0, False),
    ],
)
def test_a_run_got_worse_by_shares_of_its_gain_and_of_its_best(first, best, last, lost):
    course = course_of("eval/loss", [(0, first), (1, best), (2, last)])
    assert course.lost() is lost and bool(course.sentence()) is lost


def test_noise_is_not_worse():
    course = course_of("eval/reward", [(0, 1.0), (10, 2.0), (20, 1.5)])
    assert course.lost(error=0.2) and not course.lost(error=0.3) and course.sentence(0.3) == ""


OVERFIT = ((0, 4.0, 0.1), (10, 2.0, 0.5), (20, 1.5, 0.6), (30, 1.9, 0.65))
LOSS, ACCURACY = ("nats per token",), ("share of tokens that are the model's first choice",)
NEVER_BETTER = ((0, 1.0, 0.5), (1, 2.0, 0.4), (2, 3.0, 0.3))


@pytest.fixture
def step_of(tmp_path):
    """Makes a run's step of evaluations (step, loss, accuracy)."""

    def make(evaluations=OVERFIT, program="training.step1_sft.main", accuracy="token_accuracy", done=True, **settings):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        lines = [{"step": at, "eval/loss": loss, f"eval/{accuracy}": share} for at, loss, share in evaluations]
        write_lines(folder / "metrics.jsonl", lines)
        (folder / "config.yaml").write_text(json.dumps({"program": program, **settings}))
        (folder / "summary.json").unlink(missing_ok=True)
        if done:
            (folder / "summary.json").write_text('{"seconds": 1.0}')
        return only_step(folder)

    return make


def test_the_best_step_is_beside_the_last(step_of):
    step = step_of()
    assert best_step(step) == 20
    assert headline(step) == [
        HeadlineFigure("SFT loss", 4.0, 1.9, None, "best: 1.50 after step 20", *LOSS, got_worse=True),
        HeadlineFigure("Token accuracy", 0.1, 0.65, None, "0.600 at the best loss (step 20)", *ACCURACY),
    ]
    assert worse_sentence(step).startswith(
        "the held-out loss was lowest after step 20 (1.5) but is 1.9 after step 30 (Token accuracy got better, 0.6 to "
        "0.65): further training made it worse; "
    )


def test_a_figure_is_not_called_the_best_for_the_loss_being_it(step_of):
    step = step_of(((0, 4.0, 0.1), (10, 2.0, 0.7), (20, 1.5, 0.6)))
    assert [figure.note for figure in headline(step)] == ["best at the end", "at the best loss (step 20)"]


@pytest.mark.parametrize(("last", "tokens", "said"), [(-0.6, 30, True), (-0.4, 30, False), (-0.6, 100, False)])
def test_chosen_responses_that_become_unlikely_are_warned_of(step_of, last, tokens, said):
    step = step_of(program="training.step2_dpo.main", accuracy="accuracy", beta=0.1)
    with open(step.path / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": at, "eval/chosen_reward": r}) + "\n" for at, r in ((0, 0.0), (30, last)))
    (step.path / "data_report.json").write_text(json.dumps({"eval": {"rows": 10, "tokens": 10 * tokens}}))
    sentence = fallen_sentence(only_step(step.path))
    assert ("fell by 6 nats per response" in sentence and "--sft_coef" in sentence) is said
    page = parts_of(read_runs([step.path])).html["results"]
    assert ("fell by 6 nats" in page) is ("fell by 6 nats" in worse_at_end(step.path)) is said


def test_a_run_that_never_got_better(step_of):
    step = step_of(NEVER_BETTER)
    assert [figure.note for figure in headline(step)] == ["best before training", ""]
    assert worse_sentence(step).endswith(": training made it worse; lower the learning rate, or check the rows")
    assert worse_sentence(step_of(NEVER_BETTER[:2])) != ""  # of two evaluations too


def test_the_model_of_the_best_step_has_its_figures(step_of):
    step = step_of(load_best_model_at_end=True)
    assert headline(step) == [
        HeadlineFigure("SFT loss", 4.0, 1.5, None, "from the best step, 20", *LOSS),
        HeadlineFigure("Token accuracy", 0.1, 0.6, None, "at the best loss (step 20)", *ACCURACY),
    ]
    assert worse_sentence(step) == "" and worse_sentence(step_of(load_best_model_at_end=True, done=False)) != ""
    # The best is one after training.
    assert judged_course(step_of(NEVER_BETTER, load_best_model_at_end=True)).last == (1, 2.0)


def test_a_run_is_judged_by_the_metric_that_it_names(step_of):
    step = step_of(metric_for_best_model="eval_token_accuracy")
    assert best_step(step) == 30 and worse_sentence(step) == ""
    assert best_step(step_of(metric_for_best_model="token_accuracy", greater_is_better=False)) == 0


def test_equal_evaluations_have_no_better_one_among_them(step_of):
    step = step_of(((0, 3.0, 0.1), (10, 2.0, 0.5), (20, 2.0, 0.5)))
    assert best_step(step) == 10 and [figure.note for figure in headline(step)] == ["", ""]


def test_dpo_is_not_compared_with_its_start_where_all_pairs_tie(step_of):
    """Policy and reference are the same then: an accuracy of 0 is not a bad one."""
    evaluations = ((0, 0.69, 0.0), (10, 0.6, 0.7), (20, 0.5, 0.8))
    step = step_of(evaluations, "training.step2_dpo.main", "accuracy")
    assert [(figure.before, figure.after) for figure in headline(step)] == [(0.0, 0.8)]
    with open(step.path / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": at, "eval/reward_margin": float(at)}) + "\n" for at in (0, 20))
    figures = headline(only_step(step.path))
    assert [(figure.before, figure.after) for figure in figures] == [(0.8, None), (20.0, None)]
    assert all(figure.note for figure in figures)


@pytest.mark.parametrize(("program", "gap"), [("step2_reward", "score_gap"), ("step2_dpo", "reward_margin")])
def test_pairs_are_judged_by_their_loss(step_of, program, gap):
    program = f"training.{program}.main"
    step = step_of(program=program, accuracy="accuracy")
    assert best_step(step) == 20 and headline(step)[0].note == "0.600 at the best loss (step 20)"
    assert worse_sentence(step) == ""  # pairs are ranked better
    assert worse_sentence(step_of((*OVERFIT[:3], (30, 1.9, 0.6)), program, "accuracy")) != ""
    with open(step.path / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": at, f"eval/{gap}": 3.0 + at}) + "\n" for at in (20, 30))
    assert " got better, 23 to 33): further training made it worse; " in worse_sentence(only_step(step.path))
