"""Chosen steps leave a trace that a viewer can read, and no other step does."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from threestep.plugins.profiling.arguments import ProfilingArguments
from threestep.plugins.profiling.traces import Traces, traces_of
from training.utils.base.errors import Mistakes
from training.utils.contracts.run import ObservedRun, StepObservers
from training.utils.flags.flags import note_mistakes


def events(path) -> list[str]:
    return [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def test_the_chosen_steps_are_traced(tmp_path):
    traces = Traces({2, 3}, tmp_path / "profile", rank=1)
    seen = []
    for step in StepObservers([traces]).each(range(1, 5)):
        seen.append(step)
        if step == 3:
            torch.ones(2, 2) @ torch.ones(2, 2)
    assert seen == [1, 2, 3, 4]
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == ["step2_rank1.pt.trace.json.gz", "step3_rank1.pt.trace.json.gz"]
    assert "aten::matmul" in events(traces.path(3)) and "aten::matmul" not in events(traces.path(2))


def test_a_loop_that_breaks_or_raises_leaves_its_trace(tmp_path):
    traces = Traces({1}, tmp_path / "profile", rank=0)
    for _ in StepObservers([traces]).each(range(1, 5)):
        break
    assert traces.path(1).exists()
    traces.path(1).unlink()

    def loop() -> None:
        for _ in StepObservers([traces]).each(range(1, 5)):
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert traces.path(1).exists()


def test_without_the_flag_there_are_no_traces(tmp_path):
    run = ObservedRun("", {"profile_steps": []}, tmp_path, None, None, None)
    assert traces_of(run) is None and list(StepObservers().each(range(3))) == [0, 1, 2]


def test_steps_count_from_one():
    mistakes = Mistakes()
    note_mistakes(ProfilingArguments(profile_steps=[2, 0]), mistakes)
    assert mistakes.sentences == ["--profile_steps expects 1 or more, got 0"]
