"""metrics.jsonl and TensorBoard: rank 0 writes, the others are silent."""

from __future__ import annotations

import json
import math
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.utils.run.metrics import MetricsWriter, greater_wins
from training.utils.run.trackers import open_trackers


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
