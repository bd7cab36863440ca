"""Steps that are run again to be explained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from threestep.plugins.explain import records
from threestep.plugins.explain.records import steps_of_run
from training.utils.base.errors import ThreestepError


def _refuse(*_: Any) -> Any:
    raise AssertionError("nothing is started")


def test_nothing_is_run_again_of_a_run_that_is_not_trusted(tmp_path: Path):
    with pytest.raises(ThreestepError, match="to run it again is to run its own settings and code: give --trust_run"):
        steps_of_run(tmp_path, [1], 1, work=tmp_path / "work", start=None)


def test_rows_over_several_ranks_are_refused(tmp_path: Path, monkeypatch):
    digests = SimpleNamespace(folder=tmp_path, settings={"sequence_parallel_size": 2}, steps={(1, 0): {}})
    monkeypatch.setattr(records, "read_digests", lambda run: digests)
    with pytest.raises(ThreestepError, match="--sequence_parallel_size 2, and a step is recorded with rows whole"):
        steps_of_run(tmp_path, [1], 1, work=tmp_path / "work", start=_refuse)


def test_a_step_that_the_run_did_not_take_is_refused(tmp_path: Path, monkeypatch):
    digests = SimpleNamespace(folder=tmp_path, settings={}, steps={(1, 0): {}, (2, 0): {}})
    monkeypatch.setattr(records, "read_digests", lambda run: digests)
    with pytest.raises(ThreestepError, match="one of 1 to 2, got 5"):
        steps_of_run(tmp_path, [5], 1, work=tmp_path / "work", start=_refuse)
