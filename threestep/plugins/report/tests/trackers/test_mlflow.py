"""The calls of MLflow, see services.py; and trackers that fail."""

from __future__ import annotations

import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from threestep.plugins.report.tests.trackers.services import Recorder, written
from training.utils.base.errors import ThreestepError
from training.utils.contracts.trackers import TrackedRun
from training.utils.run.metrics import MetricsWriter
from training.utils.run.trackers import open_trackers


def test_mlflow(tmp_path, monkeypatch):
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    mlflow = Recorder("mlflow", start_run=run)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    written(tmp_path, ["mlflow"], **{"train/gap": float("inf")})
    written(tmp_path, ["mlflow"], done_steps=1)
    first, again = (named for _, named in mlflow.named("start_run"))
    assert (first["run_id"], first["run_name"]) == (None, TrackedRun(tmp_path, {}, 8).name)
    assert again["run_id"] == "r1"
    (params,) = mlflow.named("log_params")  # a resumed run's are there already
    assert params[0][0] == {"learning_rate": "0.1", "data_path": '["a"]', "limit": "null", "padded": "False"}
    assert mlflow.named("log_metrics")[1] == (({"train/loss": 2.0},), {"step": 1})  # without what no database holds
    (table, name), _ = mlflow.named("log_table")[0]
    assert name == "samples/step_000001.json" and table["response"] == ["# r"] * 8
    assert mlflow.named("end_run")[0] == (("FINISHED",), {})


def test_one_that_fails_is_left_out(tmp_path, monkeypatch, capsys):
    mlflow = Recorder("mlflow", start_run=types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1")))

    def fail(*_, **__):
        raise ConnectionError("no answer")

    mlflow.log_metrics = fail
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    written(tmp_path, ["tensorboard", "mlflow"])
    said = capsys.readouterr().out
    assert said == (
        "warning: MLflow stops receiving this run's metrics (ConnectionError: no answer)\n"
        "warning: MLflow lacks metrics from step 0 on; metrics.jsonl and the report have them\n"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert mlflow.named("end_run") == []
    assert EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")[0].value == 2.0


def test_one_that_cannot_be_opened_ends_the_run_at_its_start(tmp_path, monkeypatch):
    mlflow = Recorder("mlflow")

    def fail(*_, **__):
        raise RuntimeError("no such\nserver")

    mlflow.start_run = fail
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with pytest.raises(ThreestepError, match=r"--report_to mlflow: it cannot be opened \(RuntimeError: no such"):
        open_trackers(["mlflow"], tmp_path, {}, 0)


@pytest.mark.parametrize(("error", "status"), [(KeyError(), "FAILED"), (SystemExit(0), "FINISHED")])
def test_they_hear_how_it_ended(tmp_path, monkeypatch, error, status):
    mlflow = Recorder("mlflow", start_run=types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1")))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    trackers = open_trackers(["mlflow"], tmp_path, {}, 0)
    with pytest.raises(type(error)), MetricsWriter(tmp_path, True, trackers=trackers):
        raise error
    assert mlflow.named("end_run") == [((status,), {})]
