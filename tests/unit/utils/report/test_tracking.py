"""TensorBoard's files are read back; the services' packages are stood in for by modules that record the calls.

The services were tried with their own packages by hand (docs/report.md); what is held here is the shape of the calls.
"""

from __future__ import annotations

import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from training.utils.base.errors import ThreestepError
from training.utils.contracts.trackers import TrackedRun
from training.utils.flags.step import UNKNOWN_STEP, known_steps
from training.utils.report.trackers.tensorboard import chart_layout
from training.utils.report.tracking import open_trackers
from training.utils.run.metrics import MetricsWriter

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


def written(folder, report_to, done_steps=0, **more) -> None:
    trackers = open_trackers(report_to, folder, SETTINGS, done_steps)
    with MetricsWriter(folder, True, done_steps, trackers=trackers) as metrics:
        metrics.write(done_steps, {"eval/loss": 3.0, "eval/perplexity": 20.0})
        metrics.write(done_steps + 1, {"train/loss": 2.0, **more})
        metrics.write_samples(done_steps + 1, [SAMPLE] * 20)
        metrics.flush()


def test_tensorboard_has_layout_settings_and_samples(tmp_path):
    written(tmp_path, ["tensorboard"])
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 1
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == {"eval/loss", "eval/perplexity", "train/loss"}

    def content(plugin: str, tag: str) -> bytes:
        return board.SummaryMetadata(tag).plugin_data.content if plugin == "hparams" else board.Tensors(tag)[0]

    (layout,) = [board.Tensors(tag)[0] for tag in board.Tags()["tensors"] if tag.startswith("custom_scalars")]
    category = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0]).category[0]
    charts = {chart.title: list(chart.multiline.tag) for chart in category.chart}
    assert charts == {"Loss": ["^train/loss$", "^eval/loss$"]}
    started = plugin_data_pb2.HParamsPluginData.FromString(
        board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    ).session_start_info
    assert started.hparams["learning_rate"].number_value == 0.1
    assert started.hparams["data_path"].string_value == '["a"]'
    experiment = plugin_data_pb2.HParamsPluginData.FromString(
        board.SummaryMetadata("_hparams_/experiment").plugin_data.content
    ).experiment
    assert {info.name.tag for info in experiment.metric_infos} == {"eval/loss", "eval/perplexity"}
    texts = [tag for tag in board.Tags()["tensors"] if tag.startswith("samples/")]
    assert len(texts) == 8
    text = board.Tensors(texts[0])[0].tensor_proto.string_val[0].decode()
    assert "    response: # r\n" in text  # four spaces: a block, and # no heading


def test_a_layout_has_only_charts_with_metrics():
    assert chart_layout(known_steps()["step2_reward"], ["eval/loss", "train/accuracy"]) == {
        "Threestep": {"Loss": ["Multiline", ["^eval/loss$"]], "Accuracy": ["Multiline", ["^train/accuracy$"]]}
    }
    assert chart_layout(UNKNOWN_STEP, ["x"]) == {}


def test_nobody_is_told(tmp_path):
    written(tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_wandb(tmp_path, monkeypatch):
    run = Recorder("run")
    run.id = "abc"
    wandb = Recorder("wandb", init=run, Table="table")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
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


def test_trackio(tmp_path, monkeypatch):
    run = types.SimpleNamespace(name="brave-1")
    trackio = Recorder("trackio", init=run, Table="table")
    monkeypatch.setitem(sys.modules, "trackio", trackio)
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
    with pytest.raises(
        ThreestepError, match=r"--report_to mlflow: it cannot be opened \(RuntimeError: no such server\)"
    ):
        open_trackers(["mlflow"], tmp_path, {}, 0)


@pytest.mark.parametrize(("error", "status"), [(KeyError(), "FAILED"), (SystemExit(0), "FINISHED")])
def test_they_hear_how_it_ended(tmp_path, monkeypatch, error, status):
    mlflow = Recorder("mlflow", start_run=types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1")))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    trackers = open_trackers(["mlflow"], tmp_path, {}, 0)
    with pytest.raises(type(error)), MetricsWriter(tmp_path, True, trackers=trackers):
        raise error
    assert mlflow.named("end_run") == [((status,), {})]


OWN = """
from training.utils.contracts.trackers import Tracker

class Lines(Tracker):
    def __init__(self, run):
        super().__init__(run)
        self.known_as = run.known_as or f"lines-{run.samples}"
        (run.folder / "lines.txt").open("a").write(f"{run.done_steps} {run.known_as}\\n")

    def metrics(self, step, metrics):
        (self.run.folder / "lines.txt").open("a").write(f"{step} {metrics}\\n")
"""


def test_a_users_own_receives_the_same(tmp_path):
    """Only `metrics` has to be written; what the class is known as comes back to a resumed run."""
    (tmp_path / "own.py").write_text(OWN)
    address = f"{tmp_path}/own.py:Lines"
    written(tmp_path, [address])
    written(tmp_path, [address], done_steps=1)
    assert (tmp_path / "lines.txt").read_text().splitlines() == [
        "0 None", "0 {'eval/loss': 3.0, 'eval/perplexity': 20.0}", "1 {'train/loss': 2.0}",
        "1 lines-8", "1 {'eval/loss': 3.0, 'eval/perplexity': 20.0}", "2 {'train/loss': 2.0}",
    ]  # fmt: skip


def test_report_samples_reach_a_tracker(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tracker,) = open_trackers([f"{tmp_path}/own.py:Lines"], tmp_path, {"report_samples": 3}, 0)
    assert tracker.known_as == "lines-3"
