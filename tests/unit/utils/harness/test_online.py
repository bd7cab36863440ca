"""Tasks beside the evaluations of a run, with a stand-in for the package; tests/end_to_end/test_harness.py calls it."""

from __future__ import annotations

import contextlib
import json
import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.harness import online
from training.utils.harness.online import AskedOnline, OnlineTasks
from training.utils.harness.running import AskedModel, AskedTasks, HarnessResult, TaskFigures
from training.utils.report.arguments import ReportArguments
from training.utils.run.metrics import MetricsWriter
from training.utils.run.run_folder import RunFolder


@pytest.fixture
def asked(tmp_path) -> AskedOnline:
    """Of a model that only its name is known of."""
    ranks = SimpleNamespace(is_main=True)
    whole = SimpleNamespace(engine=SimpleNamespace(ranks=ranks), lent=lambda: contextlib.nullcontext("model"))
    model = AskedModel({"pad": None}, None, 64, 2)
    return AskedOnline(whole, model, AskedTasks("--harness_tasks", ["t.yaml"]), RunFolder(tmp_path, True))


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
        asked.evaluate(3, metrics)
        assert metrics.evaluation == {"eval/loss": 2.0, "eval/t_acc": 0.5, "eval/t_exact_strict": 1.0}
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["eval/t_acc"], last["eval/t_exact_strict"]) == (3, 0.5, 1.0)
    told = json.loads((tmp_path / "harness.json").read_text())["t"]
    assert told["metrics"]["acc"] == {"value": 0.5, "error": 0.1} and told["chat_template"] is False


def test_the_report_has_the_figures_of_the_weights_that_were_loaded(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(online, "run_harness_on", answered)
    with MetricsWriter(tmp_path, True) as metrics:
        asked.evaluate(3, metrics)
    lines = (tmp_path / "metrics.jsonl").read_text()
    better = TaskFigures(3, 0, "1", {"acc": (0.75, 0.1)})
    monkeypatch.setattr(online, "run_harness_on", lambda *given: HarnessResult("0.4.13", {"t": better}, {}))
    asked.replace_figures()
    assert json.loads((tmp_path / "harness.json").read_text())["t"]["metrics"]["acc"]["value"] == 0.75
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    OnlineTasks().replace_figures()


def test_no_random_state_and_no_tokenizer_is_moved(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(online, "run_harness_on", answered)

    def drawn() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]  # noqa: S311

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with MetricsWriter(tmp_path, True) as metrics:
        asked.evaluate(0, metrics)
    assert drawn() == expected and asked.model.tokenizer == {"pad": None}


def test_without_tasks_nothing_is_written(tmp_path):
    with MetricsWriter(tmp_path, True) as metrics:
        OnlineTasks().evaluate(1, metrics)
    assert not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text()


def test_mistakes(tmp_path, monkeypatch):
    from training.utils.base.errors import Mistakes

    def said(**given: object) -> str:
        mistakes = Mistakes()
        ReportArguments(report_to="none", **given).validate(mistakes)
        with pytest.raises(ThreestepError) as error:
            mistakes.raise_if_any()
        return str(error.value)

    assert "--harness_rows 3 is of --harness_tasks; give both or neither" in said(harness_rows=3)
    assert "--harness_tasks expects task files (FILE.yaml) on this disk, got 'gsm8k'" in said(harness_tasks=["gsm8k"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "t.yaml").touch()
    assert "--harness_tasks needs the package lm_eval" in said(harness_tasks=[str(tmp_path / "t.yaml")])
