"""metrics.jsonl, and who else is told of a run: --report_to's names and a user's own class; TensorBoard's files are
read back."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from training.utils.base.errors import ThreestepError
from training.utils.contracts.trackers import Tracker
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.step import UNKNOWN_STEP, known_steps
from training.utils.plugins.plugin import TrackerEntry
from training.utils.run.metrics import MetricsWriter, greater_wins
from training.utils.run.tensorboard import chart_layout
from training.utils.run.trackers import (
    TRACKERS,
    TRACKERS_HELP,
    WRITTEN,
    LogArguments,
    check_tracker,
    open_trackers,
    tracker_class,
    trackers_in,
)

SETTINGS = {"learning_rate": 0.1, "data_path": ["a"], "limit": None, "padded": False}
SAMPLE = {"prompt": "p", "response": "# r", "reward": 1.0, "response_tokens": 3, "ended": True}
BASE = "training.utils.contracts.trackers.Tracker"
OWN = f"""
from {BASE.rpartition(".")[0]} import Tracker

class Lines(Tracker):
    def __init__(self, run):
        super().__init__(run)
        self.known_as = run.known_as or f"lines-{{run.samples}}"
        (run.folder / "lines.txt").open("a").write(f"{{run.done_steps}} {{run.known_as}}\\n")

    def metrics(self, step, metrics):
        (self.run.folder / "lines.txt").open("a").write(f"{{step}} {{metrics}}\\n")

class Without(Tracker):
    def metric(self, step, metrics):
        pass

class Old(Lines):
    def __init__(self, folder, settings):
        pass

class Other:
    pass

text = "Lines"
"""


@pytest.fixture
def own_file(tmp_path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def reported(*words: str) -> tuple[str, ...]:
    return trackers_in(vars(parse_arguments([LogArguments], words, "")[0]))


@pytest.fixture
def further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trackers more, of plugins: the package of the first is installed, that of the second is not."""
    entries = {"kept": TrackerEntry("a:Kept", "tensorboard"), "gone": TrackerEntry("a:Gone", "gone")}
    for name, entry in entries.items():
        monkeypatch.setitem(TRACKERS, name, entry)
    plain = importlib.util.find_spec
    found = {"tensorboard": True, "gone": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[name] if name in found else plain(name))


def test_who_is_told(further):
    assert reported() == trackers_in({}) == ("tensorboard",)  # no service, unless it is asked for
    assert reported("--report_to", "none") == ()
    assert reported("--report_to", "tensorboard, kept,tensorboard") == ("tensorboard", "kept")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("gone", "gone needs the package gone: pip install gone"),
        ("tensorbord", r"expects HELP, separated by commas, or none alone, got 'tensorbord'; did you mean 'tensorboar"),
        ("none,kept", "expects HELP, separated by commas, or none alone, got 'none'"),
        ("", "expects HELP, separated by commas, or none alone, got ''"),
        ("tensorboard,nowhere.py:Mine", "expects an existing file, got 'nowhere.py'"),
    ],
)
def test_names_that_are_none(further, given, words):
    with pytest.raises(ThreestepError, match="--report_to " + words.replace("HELP", TRACKERS_HELP)):
        reported("--report_to", given)


@pytest.mark.parametrize("name", TRACKERS)
def test_every_name_has_a_class(name):
    kind = tracker_class(name)
    assert issubclass(kind, Tracker) and not kind.__abstractmethods__ and name in TRACKERS_HELP.split(", ")
    assert {"tracker_runs.json", "tensorboard/"} <= set(WRITTEN)


def test_the_table_loads_neither_torch_nor_a_tracker():
    program = (
        "import sys\nfrom training.utils.run.trackers import LogArguments\nLogArguments()\n"
        "loaded = {'torch', 'tensorboard', 'training.utils.run.tensorboard'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("Linos", "'FILE' has no 'Linos'; did you mean 'Lines'?", ""),
        ("Other", f"expects 'FILE:Other' to be a subclass of {BASE}, got <class '", ".Other'>; derive it from that"),
        ("text", f"expects 'FILE:text' to be a subclass of {BASE}, got 'Lines'; derive it from that", ""),
        ("Without", "expects 'FILE:Without' to define metrics; add what is missing", ""),
        (
            "Old",
            "expects a class of (run), got 'FILE:Old', which takes (folder, settings): missing a ",
            "'settings'",
        ),
    ],
)
def test_mistakes_in_a_users_class(own_file, name, start, end):
    check_tracker(f"{own_file}:Lines")
    with pytest.raises(ThreestepError) as caught:
        check_tracker(f"{own_file}:{name}")
    said = str(caught.value).removeprefix("--report_to").lstrip(": ")
    assert said.startswith(start.replace("FILE", own_file)) and said.endswith(end)


def written(folder, report_to, done_steps=0) -> None:
    trackers = open_trackers(report_to, folder, SETTINGS, done_steps)
    with MetricsWriter(folder, True, done_steps, trackers=trackers) as metrics:
        metrics.write(done_steps, {"eval/loss": 3.0, "eval/perplexity": 20.0})
        metrics.write(done_steps + 1, {"train/loss": 2.0})
        metrics.write_samples(done_steps + 1, [SAMPLE] * 20)
        metrics.flush()


def test_tensorboard_has_layout_settings_and_samples(tmp_path):
    written(tmp_path, ["tensorboard"])
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == {"eval/loss", "eval/perplexity", "train/loss"}

    def settings(tag: str) -> plugin_data_pb2.HParamsPluginData:
        content = board.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content
        return plugin_data_pb2.HParamsPluginData.FromString(content)

    (layout,) = [board.Tensors(tag)[0] for tag in board.Tags()["tensors"] if tag.startswith("custom_scalars")]
    category = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0]).category[0]
    charts = {chart.title: list(chart.multiline.tag) for chart in category.chart}
    assert charts == {"Loss": ["^train/loss$", "^eval/loss$"]}
    hparams = settings("session_start_info").session_start_info.hparams
    assert hparams["learning_rate"].number_value == 0.1 and hparams["data_path"].string_value == '["a"]'
    metric_infos = settings("experiment").experiment.metric_infos
    assert {info.name.tag for info in metric_infos} == {"eval/loss", "eval/perplexity"}
    texts = [tag for tag in board.Tags()["tensors"] if tag.startswith("samples/")]
    text = board.Tensors(texts[0])[0].tensor_proto.string_val[0].decode()
    assert len(texts) == 8 and "    response: # r\n" in text  # four spaces: a block, and # no heading


def test_a_layout_has_only_charts_with_metrics():
    assert chart_layout(known_steps()["step2_reward"], ["eval/loss", "train/accuracy"]) == {
        "Threestep": {"Loss": ["Multiline", ["^eval/loss$"]], "Accuracy": ["Multiline", ["^train/accuracy$"]]}
    }
    assert chart_layout(UNKNOWN_STEP, ["x"]) == {}


def test_a_users_own_receives_the_same(tmp_path, own_file):
    """Only `metrics` has to be written; what the class is known as comes back to a resumed run."""
    address = f"{own_file}:Lines"
    written(tmp_path, [address])
    written(tmp_path, [address], done_steps=1)
    assert (tmp_path / "lines.txt").read_text().splitlines() == [
        "0 None", "0 {'eval/loss': 3.0, 'eval/perplexity': 20.0}", "1 {'train/loss': 2.0}",
        "1 lines-8", "1 {'eval/loss': 3.0, 'eval/perplexity': 20.0}", "2 {'train/loss': 2.0}",
    ]  # fmt: skip
    (tmp_path / "tracker_runs.json").unlink()
    (tracker,) = open_trackers([address], tmp_path, {"report_samples": 3}, 0)
    assert tracker.known_as == "lines-3"


def opened(folder, done_steps: int = 0, done_seconds: float = 0.0) -> MetricsWriter:
    trackers = open_trackers(["tensorboard"], folder, {}, done_steps)
    return MetricsWriter(folder, True, done_steps, done_seconds, trackers=trackers)


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_loss_is_better_when_it_is_less():
    names = ("eval/loss", "eval/perplexity", "eval/reward")
    assert [greater_wins(name) for name in names] == [False, False, True]
    assert greater_wins("eval/loss", True) and not greater_wins("eval/reward", False)


def test_one_object_a_step_and_the_same_names_in_tensorboard(tmp_path):
    with pytest.raises(KeyError), opened(tmp_path) as metrics:
        metrics.write(1, {"train/loss": 2.5, "train/tokens": 3})
        assert lines_of(tmp_path)[0]["train/loss"] == 2.5  # flushed: there while the run goes on
        metrics.write(2, {"train/loss": 1.5, "train/lost": math.nan})
        raise KeyError
    first, second = lines_of(tmp_path)
    assert first.pop("seconds") >= 0
    assert first == {"step": 1, "train/loss": 2.5, "train/tokens": 3.0}
    assert second["step"] == 2 and second["train/lost"] is None
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) >= {"train/loss", "train/tokens"}
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 2.5), (2, 1.5)]


def test_a_new_run_replaces_the_curves_of_an_earlier_one(tmp_path):
    for value in (1.0, 2.0):
        with opened(tmp_path) as metrics:
            metrics.write(1, {"a": value})
    with MetricsWriter(tmp_path / "out", is_main_rank=False) as metrics:  # another rank's
        metrics.write(1, {"a": 1.0})
    assert not (tmp_path / "out").exists()
    assert [line["a"] for line in lines_of(tmp_path)] == [2.0]
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 1


def test_a_resumed_run_goes_on_in_both(tmp_path):
    with opened(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, {"a": float(step)})
            if step == 2:
                metrics.flush()
                size = (tmp_path / "metrics.jsonl").stat().st_size
    with open(tmp_path / "metrics.jsonl", "r+") as file:  # as a resumed run's folder does
        file.truncate(size)
    # Files of one second and process are read by their number as text, 10 before 9 (event_file_writer.py).
    time.sleep(1.0 - time.time() % 1.0)
    with opened(tmp_path, done_steps=2, done_seconds=100.0) as metrics:
        metrics.write(3, {"a": 30.0})
        metrics.write(4, {"a": 40.0})
    lines = lines_of(tmp_path)
    assert [(line["step"], line["a"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    assert lines[1]["seconds"] < 100.0 <= lines[2]["seconds"]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("a")] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
