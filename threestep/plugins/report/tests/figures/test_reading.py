"""What is in a run's folder is read, what is not there is empty, what cannot be read is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from threestep.plugins.report.figures.reading import RunReader, finite, read_runs, short_names
from training.utils.base.errors import ThreestepError


def only_step(folder):
    (run,) = read_runs([folder])
    (step,) = run.steps
    return step


def test_one_step(sft_run):
    step = only_step(sft_run(batch=8))
    assert (step.run, step.declaration.kind) == ("sft", "sft")
    assert step.points("train/loss") == [(1, 4.0), (2, 3.0), (3, 2.5)]
    assert step.settings == {"seed": 1, "neftune_alpha": 0.0, "learning_rate": 0.1, "batch": 8}
    assert step.summary["eval_loss_after"] == 2.4
    assert step.reports.data_report["train"]["truncated"] == 4
    assert step.problems == ()
    assert "step" not in step.names and "seconds" not in step.names


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
    step = only_step(folder)
    found = [(label, [sample["step"] for sample in samples]) for label, samples in step.samples]
    assert found == [("SFT", [0] * 8), ("PPO", [20] * 8)]


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
    step = only_step(folder)
    assert step.points("train/loss") == [(1, 4.0), (2, 3.0), (3, 2.5)]
    assert step.problems == (
        "metrics.jsonl: 2 lines could not be read", "config.yaml could not be read", "summary.json could not be read",
    )  # fmt: skip
    assert len(step.samples) == 1


def test_settings_that_take_memory_are_not_read(sft_run):
    folder = sft_run()
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (folder / "config.yaml").write_text("\n".join(["a0: &a0 [1]", *lines]))
    (folder / "summary.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert only_step(folder).problems == ("config.yaml could not be read", "summary.json could not be read")


def test_numbers_that_are_none_are_gaps(tmp_path):
    lines = ['{"step": 1, "a": NaN, "b": null, "c": Infinity, "d": "4", "e": true, "f": 1e308, "g": 5}']
    lines[0] = lines[0].replace('"g": 5', '"g": 5, "h": 1' + "0" * 400)
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    step = only_step(tmp_path)
    assert {name: step.points(name)[0][1] for name in "abcdefgh"} == {**dict.fromkeys("abcdefh"), "g": 5.0}


@pytest.mark.parametrize(("value", "number"), [(1, 1.0), (-0.5, -0.5), ("1", None), (None, None), (True, None)])
def test_finite(value, number):
    assert finite(value) == number


def test_names_tell_runs_apart():
    paths = [Path("/w/a/step1"), Path("/w/b/step1"), Path("/w/b/step3")]
    assert short_names(paths) == ["a/step1", "b/step1", "b/step3"]
    assert short_names([Path("/w/a"), Path("/w/b")]) == ["a", "b"]
    assert short_names([Path("/")]) == ["/"]


def test_the_same_folder_counts_once(sft_run):
    folder = sft_run()
    assert len(read_runs([folder, f"{folder}/", folder / "."])) == 1


def test_no_folder_and_no_run_are_mistakes(tmp_path):
    with pytest.raises(ThreestepError, match=r"expected a run's folder \(its --output_dir\), got .*/gone, which is"):
        read_runs([tmp_path / "gone"])
    (tmp_path / "summary.json").write_text(json.dumps({}))
    with pytest.raises(ThreestepError, match="holds no run: expected one of metrics.jsonl, config.yaml, samples.jsonl"):
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


def test_of_many_evaluations_some_are_kept_and_the_last_one(ppo_run):
    samples = [{"step": step, "prompt": f"p{place}"} for step in range(100) for place in range(5)]
    step = only_step(ppo_run("many", samples))
    kept = list(dict.fromkeys(sample["step"] for sample in step.first_prompts))
    assert kept[0] == 0 and kept[-1] == 99 and 6 <= len(kept) <= 15
    assert len(step.first_prompts) == 3 * len(kept)
    assert [len(samples) for _, samples in step.samples] == [5, 5]
