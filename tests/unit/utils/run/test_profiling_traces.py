"""Chosen steps leave a trace that a viewer can read, and no other step does."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes
from training.utils.run.profiling import Traces, traced
from training.utils.run.run_arguments import RunArguments


def events(path) -> list[str]:
    return [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def test_the_chosen_steps_are_traced(tmp_path):
    traces = RunArguments(output_dir=str(tmp_path), profile_steps=[2, 3]).traces()
    seen = []
    for step in traced(range(1, 5), traces, rank=1):
        seen.append(step)
        if step == 3:
            torch.ones(2, 2) @ torch.ones(2, 2)
    assert seen == [1, 2, 3, 4]
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == ["step2_rank1.pt.trace.json.gz", "step3_rank1.pt.trace.json.gz"]
    assert "aten::matmul" in events(traces.path(3, 1)) and "aten::matmul" not in events(traces.path(2, 1))


def test_a_loop_that_breaks_or_raises_leaves_its_trace(tmp_path):
    traces = RunArguments(output_dir=str(tmp_path), profile_steps=[1]).traces()
    for _ in traced(range(1, 5), traces, rank=0):
        break
    assert traces.path(1, 0).exists()
    traces.path(1, 0).unlink()

    def loop() -> None:
        for _ in traced(range(1, 5), traces, rank=0):
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert traces.path(1, 0).exists()


def test_without_the_flag_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(traced(range(3), Traces(), 0)) == [0, 1, 2] and not list(tmp_path.iterdir())


def test_steps_count_from_one():
    mistakes = Mistakes()
    note_mistakes(RunArguments(profile_steps=[2, 0]), mistakes)
    assert mistakes.sentences == ["--profile_steps expects 1 or more, got 0"]
