"""TensorBoard's files are read back, and a user's own class receives the same."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from training.utils.flags.step import UNKNOWN_STEP, known_steps
from training.utils.run.metrics import MetricsWriter
from training.utils.run.tensorboard import chart_layout
from training.utils.run.trackers import open_trackers

SETTINGS = {"learning_rate": 0.1, "data_path": ["a"], "limit": None, "padded": False}
SAMPLE = {"prompt": "p", "response": "# r", "reward": 1.0, "response_tokens": 3, "ended": True}


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
