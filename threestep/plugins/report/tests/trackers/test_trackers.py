"""The calls of services, whose packages modules stand in for, and trackers that fail.

The services were tried with their own packages by hand; what is held here is the shape of the calls.
"""

from __future__ import annotations

import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.utils.base.errors import ThreestepError
from training.utils.contracts.trackers import TrackedRun
from training.utils.run.metrics import MetricsWriter
from training.utils.run.trackers import open_trackers

SETTINGS = {"learning_rate": 0.1, "data_path": ["a"], "limit": None, "padded": False}
SAMPLE = {"prompt": "p", "response": "# r", "reward": 1.0, "response_tokens": 3, "ended": True}


class Recorder(types.ModuleType):
    """A module whose every function notes its call; what `results` names gives its value back."""

    def __init__(self, name: str, **results) -> None:
        super().__init__(name)
        self.calls: list[tuple] = []
        self.results = results

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*words, **named):
            self.calls.append((name, words, named))
            return self.results.get(name)

        return call

    def named(self, name: str) -> list[tuple]:
        return [(words, named) for called, words, named in self.calls if called == name]


@pytest.fixture
def service(monkeypatch):
    """Stands in for a package."""

    def make(name: str, **results) -> Recorder:
        monkeypatch.setitem(sys.modules, name, Recorder(name, **results))
        return sys.modules[name]

    return make


@pytest.fixture
def mlflow(service) -> Recorder:
    return service("mlflow", start_run=types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1")))


def written(folder, report_to, done_steps=0, **more) -> None:
    trackers = open_trackers(report_to, folder, SETTINGS, done_steps)
    with MetricsWriter(folder, True, done_steps, trackers=trackers) as metrics:
        metrics.write(done_steps, {"eval/loss": 3.0, "eval/perplexity": 20.0})
        metrics.write(done_steps + 1, {"train/loss": 2.0, **more})
        metrics.write_samples(done_steps + 1, [SAMPLE] * 20)
        metrics.flush()


def test_wandb(tmp_path, service, monkeypatch):
    run = Recorder("run")
    run.id = "abc"
    wandb = service("wandb", init=run, Table="table")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    written(tmp_path, ["wandb"])
    written(tmp_path, ["wandb"], done_steps=1)
    written(tmp_path, [])  # another run in the same folder
    assert not (tmp_path / "tracker_runs.json").exists()
    first, again = (named for _, named in wandb.named("init"))
    assert (first["project"], first["name"], first["config"]) == ("mine", TrackedRun(tmp_path, {}, 8).name, SETTINGS)
    assert (first["id"], first["resume"]) == (None, None)
    assert (again["id"], again["resume"]) == ("abc", "allow")  # a resumed run goes on
    assert run.named("define_metric")[0] == (("*",), {"step_metric": "step"})
    assert [words[0] for words, _ in run.named("log")][:3] == [
        {"step": 0, "eval/loss": 3.0, "eval/perplexity": 20.0}, {"step": 1, "train/loss": 2.0},
        {"step": 1, "samples": "table"},
    ]  # fmt: skip
    assert run.named("finish")[0] == ((), {"exit_code": 0})


def test_trackio(tmp_path, service, monkeypatch):
    trackio = service("trackio", init=types.SimpleNamespace(name="brave-1"), Table="table")
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    written(tmp_path, ["trackio"])
    written(tmp_path, ["trackio"], done_steps=1)
    first, again = (named for _, named in trackio.named("init"))
    assert (first["project"], first["name"], first["resume"]) == ("threestep", None, "never")
    assert first["config"]["data_path"] == '["a"]'
    assert (again["name"], again["resume"]) == ("brave-1", "allow")
    assert trackio.named("log")[1] == (({"train/loss": 2.0},), {"step": 1})
    assert trackio.named("log")[2] == (({"samples": "table"},), {"step": 1})
    assert len(trackio.named("finish")) == 2


def test_mlflow(tmp_path, mlflow):
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


def raising(problem: Exception):
    def fail(*_, **__):
        raise problem

    return fail


def test_one_that_fails_is_left_out(tmp_path, mlflow, capsys):
    mlflow.log_metrics = raising(ConnectionError("no answer"))
    written(tmp_path, ["tensorboard", "mlflow"])
    assert capsys.readouterr().out == (
        "warning: MLflow no longer receives this run's metrics (ConnectionError: no answer)\n"
        "warning: MLflow lacks metrics from step 0 on; metrics.jsonl and the report have them\n"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert mlflow.named("end_run") == []
    assert EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")[0].value == 2.0


def test_one_that_cannot_be_opened_ends_the_run_at_its_start(tmp_path, mlflow):
    mlflow.start_run = raising(RuntimeError("no such\nserver"))
    with pytest.raises(
        ThreestepError, match=r"--report_to mlflow: the tracker cannot be opened \(RuntimeError: no such"
    ):
        open_trackers(["mlflow"], tmp_path, {}, 0)


@pytest.mark.parametrize(("error", "status"), [(KeyError(), "FAILED"), (SystemExit(0), "FINISHED")])
def test_they_hear_how_it_ended(tmp_path, mlflow, error, status):
    trackers = open_trackers(["mlflow"], tmp_path, {}, 0)
    with pytest.raises(type(error)), MetricsWriter(tmp_path, True, trackers=trackers):
        raise error
    assert mlflow.named("end_run") == [((status,), {})]
