"""metrics.jsonl, TensorBoard and the bar: rank 0 writes, the others are silent."""

from __future__ import annotations

import json
import math
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.utils.run.metrics import MetricsWriter, progress_bar, say, show


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_object_a_step_and_the_same_names_in_tensorboard(tmp_path):
    with MetricsWriter(tmp_path, is_main_rank=True) as metrics:
        metrics.write(1, {"train/loss": 2.5, "train/tokens": 3})
        assert lines_of(tmp_path)[0]["train/loss"] == 2.5  # flushed: there while the run goes on
        metrics.write(2, {"train/loss": 1.5})
    first, second = lines_of(tmp_path)
    assert first.pop("seconds") >= 0
    assert first == {"step": 1, "train/loss": 2.5, "train/tokens": 3.0}
    assert second["step"] == 2
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == {"train/loss", "train/tokens"}
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 2.5), (2, 1.5)]


def test_a_number_that_is_none_keeps_the_line_readable(tmp_path):
    with MetricsWriter(tmp_path, is_main_rank=True) as metrics:
        metrics.write(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    line = lines_of(tmp_path)[0]
    assert (line["a"], line["b"], line["c"]) == (None, None, 1.0)


def test_other_ranks_write_nothing(tmp_path):
    with MetricsWriter(tmp_path / "out", is_main_rank=False) as metrics:
        metrics.write(1, {"a": 1.0})
    assert not (tmp_path / "out").exists()


def test_a_new_run_replaces_the_curves_of_an_earlier_one(tmp_path):
    for value in (1.0, 2.0):
        with MetricsWriter(tmp_path, is_main_rank=True) as metrics:
            metrics.write(1, {"a": value})
    assert [line["a"] for line in lines_of(tmp_path)] == [2.0]
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 1


def test_files_are_closed_after_an_error(tmp_path):
    with pytest.raises(KeyError), MetricsWriter(tmp_path, is_main_rank=True) as metrics:
        metrics.write(1, {"a": 1.0})
        raise KeyError
    assert metrics._file.closed
    assert lines_of(tmp_path)[0]["a"] == 1.0


def test_the_bar_is_silent_on_other_ranks(capsys):
    for is_main in (True, False):
        with progress_bar(2, "step 1", is_main) as bar:
            show(bar, "loss 1.0")
            show(bar, "loss 0.5")
        said = capsys.readouterr().err
        assert ("loss 0.5" in said and "step 2 of 2" in said) == is_main
        assert bool(said) == is_main


def test_a_log_has_a_line_at_each_tenth(capsys):
    with progress_bar(200, "step 1", True) as bar:
        for step in range(1, 201):
            show(bar, f"loss {step}, 5 tok/s")
            say("between")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert re.fullmatch(r"step 1: step 20 of 200, loss 20, 5 tok/s, \d\d:\d\d left", lines[0])
    assert lines[-1] == "step 1: step 200 of 200, loss 200, 5 tok/s"
    with progress_bar(10, "step 1", True, done=7) as bar:  # a resumed run
        show(bar, "a")
    assert capsys.readouterr().err.startswith("step 1: step 8 of 10, a, ")
    with progress_bar(1, "reference", True) as bar:  # without figures
        bar.update(1)
    assert capsys.readouterr().err == "reference: step 1 of 1\n"
    with progress_bar(10, "data", True, on_terminal_only=True) as bar:
        bar.update(10)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_with_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress_bar(4, "step 1", True) as bar:
        bar.mininterval = 0.0
        show(bar, "loss 1.0, 5 tok/s")
    said = capsys.readouterr().err
    assert re.search(r"step 1: +25%.*1/4 \[\d\d:\d\d<\d\d:\d\d, .*loss 1.0, 5 tok/s", said)


def test_only_rank_0_speaks(capsys):
    say("one")
    say("two", is_main_rank=False)
    assert capsys.readouterr().out == "one\n"


def test_a_resumed_run_goes_on_in_both(tmp_path):
    with MetricsWriter(tmp_path, is_main_rank=True) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, {"a": float(step)})
            if step == 2:
                metrics.flush()
                size = (tmp_path / "metrics.jsonl").stat().st_size
    with open(tmp_path / "metrics.jsonl", "r+") as file:  # as a resumed run's folder does
        file.truncate(size)
    with MetricsWriter(tmp_path, is_main_rank=True, done_steps=2, done_seconds=100.0) as metrics:
        metrics.write(3, {"a": 30.0})
        metrics.write(4, {"a": 40.0})
    lines = lines_of(tmp_path)
    assert [(line["step"], line["a"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    assert lines[1]["seconds"] < 100.0 <= lines[2]["seconds"]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("a")] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
