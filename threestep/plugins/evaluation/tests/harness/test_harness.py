"""Tasks of lm_eval by a stand-in: what is refused, where figures go, and tasks beside the evaluations of a run."""

from __future__ import annotations

import contextlib
import json
import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from tests.support.tiny_models import tiny_config
from threestep.plugins.evaluation import evaluate
from threestep.plugins.evaluation.harness import online, running, task
from threestep.plugins.evaluation.harness.arguments import HarnessArguments, RunTaskArguments, check_run_tasks
from threestep.plugins.evaluation.harness.online import OnlineTasks, open_tasks
from threestep.plugins.evaluation.harness.running import (
    AskedModel,
    AskedTasks,
    HarnessResult,
    TaskFigures,
    _result,
    _sentence_of,
)
from threestep.plugins.evaluation.opening import Evaluated
from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.pages.page import parts_of
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.other_runs import remove_earlier_run
from training.utils.contracts.run import EvaluatedRun
from training.utils.run.metrics import MetricsWriter
from training.utils.run.run_folder import RunFolder


def refused(*flags: str) -> str:
    with pytest.raises(ThreestepError) as error:
        evaluate.main(["harness", "--model_name_or_path", "nowhere", *flags])
    return str(error.value)


def test_flags_without_use_are_refused():
    found = refused("--data_path", "embedded", "--val_samples", "2", "--reward", "length")
    assert "harness expects --tasks" in found and "--data_path is not used here" in found
    assert "--val_samples 2 is" in found and "--reward length is" in found
    assert "--num_fewshot 2 needs --tasks" in refused("--num_fewshot", "2")
    assert "--rollout_engine is not used here" in refused("--tasks", "a", "--rollout_engine", "vllm")
    with pytest.raises(ThreestepError, match="--tasks is only for harness, not for reward; remove --tasks"):
        evaluate.main(["reward", "--model_name_or_path", "nowhere", "--tasks", "a"])


def test_without_the_package_it_says_how_to_have_it(monkeypatch):
    monkeypatch.setattr(running, "PACKAGE", "no_such_package")
    assert refused("--tasks", "a") == (
        "harness needs the package lm_eval, which is not installed; in the checkout, run pip install -e '.[harness]'"
    )


def test_a_hub_that_cannot_be_reached_is_a_sentence():
    for problem in (ConnectionError("no route"), ValueError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)")):
        found = _sentence_of(problem, AskedTasks("--tasks", ["gsm8k"]))
        assert found.startswith("--tasks gsm8k: lm_eval could not fetch data or a metric from the hub (")
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
            assert (lines[-1] == f"added to the run's report: {run / 'report.html'}") == (path != tmp_path)
    assert json.loads((tmp_path / "out" / "harness.jsonl").read_text()) == {"task": "<b>", "doc_id": 0}
    assert list(json.loads((run / "harness.json").read_text())) == ["first", "<b>"]
    html = parts_of(read_runs([run])).html["benchmarks"]
    assert "0.5 ± 0.25" in html and "0.75 ± 0.25" in html and "&lt;b&gt;" in html and "<b>" not in html
    assert (run / "report.html").is_file() and not (tmp_path / "harness.json").exists()


@pytest.fixture
def asked(tmp_path) -> OnlineTasks:
    """Of a model that only its name is known of."""
    ranks = SimpleNamespace(is_main=True)
    whole = SimpleNamespace(engine=SimpleNamespace(ranks=ranks), lent=lambda: contextlib.nullcontext("model"))
    model = AskedModel({"pad": None}, None, 64, 2)
    return OnlineTasks(whole, model, AskedTasks("--harness_tasks", ["t.yaml"]), RunFolder(tmp_path, True))


def answered(model: str, given: AskedModel, tasks: AskedTasks) -> HarnessResult:
    """As lm_eval does: seeds everything, and gives the tokenizer a pad token."""
    assert model == "model" and tasks.names == ["t.yaml"]
    random.seed(0)
    numpy.random.seed(1234)
    torch.manual_seed(1234)
    given.tokenizer["pad"] = "eos"
    figures = TaskFigures(3, 0, "1", {"acc": (0.5, 0.1), "exact,strict": (1.0, None)})
    return HarnessResult("0.4.13", {"t": figures}, {"t": [{"doc_id": 0}]})


def test_figures_stand_beside_those_of_the_evaluation(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(online, "run_harness_on", answered)
    with MetricsWriter(tmp_path, True) as metrics:
        metrics.write(3, {"eval/loss": 2.0})
        metrics.write_beside(3, asked.figures(3))
        assert metrics.evaluation == {"eval/loss": 2.0, "eval/t_acc": 0.5, "eval/t_exact_strict": 1.0}
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["eval/t_acc"], last["eval/t_exact_strict"]) == (3, 0.5, 1.0)
    told = json.loads((tmp_path / "harness.json").read_text())["t"]
    assert told["metrics"]["acc"] == {"value": 0.5, "error": 0.1} and told["chat_template"] is False


def test_the_report_has_the_figures_of_the_weights_that_were_loaded(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(online, "run_harness_on", answered)
    asked.figures(3)
    better = TaskFigures(3, 0, "1", {"acc": (0.75, 0.1)})
    monkeypatch.setattr(online, "run_harness_on", lambda *given: HarnessResult("0.4.13", {"t": better}, {}))
    asked.restored()
    assert json.loads((tmp_path / "harness.json").read_text())["t"]["metrics"]["acc"]["value"] == 0.75


def test_no_random_state_and_no_tokenizer_is_moved(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(online, "run_harness_on", answered)

    def drawn() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]  # noqa: S311

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    asked.figures(0)
    assert drawn() == expected and asked.model.tokenizer == {"pad": None}


def test_a_run_asks_its_model_by_the_template_of_its_rows(tmp_path):
    whole: Any = SimpleNamespace(model=SimpleNamespace(config=tiny_config("llama", max_position_embeddings=32)))
    run = EvaluatedRun({"harness_tasks": ["t.yaml"], "harness_rows": 5}, None, whole, "words", {"a": 1}, 4)  # type: ignore[arg-type]
    asked = open_tasks(run)
    assert asked is not None and asked.model == AskedModel("words", {"a": 1}, 32, 4)
    assert asked.tasks == AskedTasks("--harness_tasks", ["t.yaml"], rows=5)
    assert open_tasks(run._replace(settings={"harness_tasks": []})) is None


def test_mistakes(tmp_path, monkeypatch):
    def said(**given: object) -> str:
        mistakes = Mistakes()
        RunTaskArguments(**given).validate(mistakes)
        with pytest.raises(ThreestepError) as error:
            mistakes.raise_if_any()
        return str(error.value)

    assert "--harness_rows 3 needs --harness_tasks; use both or neither" in said(harness_rows=3)
    assert "--harness_tasks expects local task files (FILE.yaml), got 'gsm8k'" in said(harness_tasks=["gsm8k"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "t.yaml").touch()
    assert "--harness_tasks needs the package lm_eval" in said(harness_tasks=[str(tmp_path / "t.yaml")])


@pytest.mark.parametrize(("kind", "tasks", "is_wrong"), [("reward", 1, True), ("reward", 0, False), ("sft", 1, False)])
def test_a_reward_model_answers_no_tasks(kind, tasks, is_wrong):
    given = RunTaskArguments(harness_tasks=["t.yaml"] * tasks)
    flags = SimpleNamespace(step=SimpleNamespace(kind=kind), added=SimpleNamespace(of=lambda _: given))
    mistakes = Mistakes()
    check_run_tasks(flags, mistakes)
    sentence = "--harness_tasks needs a language model, but this step trains a reward model; remove --harness_tasks"
    assert mistakes.sentences == ([sentence] if is_wrong else [])


def test_figures_of_an_earlier_harness_are_removed(tmp_path):
    for name in ("harness.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    remove_earlier_run(CheckpointFolder(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt"}
