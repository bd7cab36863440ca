"""`evaluate harness`: what it refuses, and where its figures go. The package itself is called in test_running."""

from __future__ import annotations

import json

import pytest

from threestep.plugins.evaluation import evaluate
from threestep.plugins.evaluation.harness import running, task
from threestep.plugins.evaluation.harness.arguments import HarnessArguments
from threestep.plugins.evaluation.harness.running import AskedTasks, HarnessResult, TaskFigures, _result, _sentence_of
from threestep.plugins.evaluation.opening import Evaluated
from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.pages.page import parts_of
from training.utils.base.errors import ThreestepError


def refused(*flags: str) -> str:
    with pytest.raises(ThreestepError) as error:
        evaluate.main(["harness", "--model_name_or_path", "nowhere", *flags])
    return str(error.value)


def test_flags_without_use_are_refused():
    found = refused("--data_path", "embedded", "--val_samples", "2", "--reward", "length")
    for part in (
        "harness expects --tasks",
        "--data_path has no use here",
        "--val_samples 2 has",
        "--reward length has",
    ):
        assert part in found
    assert "--num_fewshot 2 is for --tasks" in refused("--num_fewshot", "2")
    assert "--rollout_engine has no use here" in refused("--tasks", "a", "--rollout_engine", "vllm")
    with pytest.raises(ThreestepError, match="--tasks is only for harness, and reward takes none"):
        evaluate.main(["reward", "--model_name_or_path", "nowhere", "--tasks", "a"])


def test_without_the_package_it_says_how_to_have_it(monkeypatch):
    monkeypatch.setattr(running, "PACKAGE", "no_such_package")
    assert refused("--tasks", "a") == (
        "harness needs the package lm_eval, which is not installed; run: pip install threestep[harness]"
    )


def test_a_hub_that_cannot_be_reached_is_a_sentence():
    for problem in (ConnectionError("no route"), ValueError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)")):
        found = _sentence_of(problem, AskedTasks("--tasks", ["gsm8k"]))
        assert found.startswith("--tasks gsm8k: lm_eval would fetch data or a metric from a hub, and cannot (")
    tasks = AskedTasks("--tasks", ["a", "b"])
    assert _sentence_of(KeyError("x"), tasks) == "--tasks a b: lm_eval failed with KeyError: 'x'"


def test_figures_of_a_result():
    found = {
        "results": {
            "one": {"alias": "one", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact,strict": 1.0,
                    "exact_stderr,strict": "N/A"}
        },
        "n-samples": {"one": {"original": 9, "effective": 4}}, "n-shot": {"one": 2}, "versions": {"one": 1.0},
        "samples": {"one": [{"doc_id": 0}]},
    }  # fmt: skip
    result = _result("0.4", found)
    assert result.tasks == {"one": TaskFigures(4, 2, "1.0", {"acc": (0.5, 0.1), "exact,strict": (1.0, None)})}
    assert result.samples == {"one": [{"doc_id": 0}]}


def test_figures_stand_in_the_run_and_in_its_report(tmp_path):
    """Also those of an earlier task; a model that no run left has none."""
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    results = {
        name: HarnessResult("0.4.13", {name: TaskFigures(8, 0, "1", {"acc": (value, 0.25)})}, {name: [{"doc_id": 0}]})
        for name, value in (("first", 0.5), ("<b>", 0.75))
    }
    for path in (run / "model", tmp_path):
        for name, result in results.items():
            line = f"--model_name_or_path {path} --output_dir {tmp_path / 'out'} --tasks {name}".split()
            groups = evaluate.parse_arguments(evaluate.GROUPS, line, "", {})
            flags = Evaluated("harness", *groups[:-1])
            lines = task._write(flags, HarnessArguments(tasks=[name]), result, templated=True)
            assert (lines[-1] == f"in the run's report: {run / 'report.html'}") == (path != tmp_path)
    assert json.loads((tmp_path / "out" / "harness.jsonl").read_text()) == {"task": "<b>", "doc_id": 0}
    assert list(json.loads((run / "harness.json").read_text())) == ["first", "<b>"]
    html = parts_of(read_runs([run])).html["benchmarks"]
    assert "0.5 ± 0.25" in html and "0.75 ± 0.25" in html and "&lt;b&gt;" in html and "<b>" not in html
    assert (run / "report.html").is_file() and not (tmp_path / "harness.json").exists()
