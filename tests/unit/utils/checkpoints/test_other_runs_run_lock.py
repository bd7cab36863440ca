"""One run at a time in a folder: the second is told of the first, and a killed one stands in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.forked_programs import Program, start_python
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints import other_runs
from training.utils.checkpoints.other_runs import only_run

HOLD = """
import sys, time
from training.utils.checkpoints.other_runs import only_run
with only_run(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(other_runs, "_PATIENCE_SECONDS", 0.0)


def holder(folder: Path, said: Path) -> Program:
    process = start_python(["-c", HOLD, str(folder)], os.environ, said, said)
    deadline = time.monotonic() + 60
    while not (said.exists() and said.read_text() == "held\n") and time.monotonic() < deadline:
        assert process.poll() is None, said.read_text()
        time.sleep(0.02)
    return process


def test_others_are_told_who_holds_the_folder_until_it_is_killed(tmp_path):
    folder = tmp_path / "run"
    first = holder(folder, tmp_path / "said.txt")
    try:
        about = json.loads((folder / ".running").read_text())
        assert about["pid"] == first.pid
        for _ in range(2):  # three on one folder
            with pytest.raises(ThreestepError) as told, only_run(folder):
                pass
            assert str(told.value) == (
                f"--output_dir {folder} is in use by a run: process {first.pid} on {about['host']}, since "
                f"{about['since']}; wait for its end or give another --output_dir"
            )
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert (folder / ".running").exists()
    with only_run(folder):
        assert json.loads((folder / ".running").read_text())["pid"] == os.getpid()
    assert list(folder.iterdir()) == []


def test_the_folder_is_free_after_a_mistake(tmp_path):
    with pytest.raises(ThreestepError, match="mine"), only_run(tmp_path):
        raise ThreestepError("mine")
    with only_run(tmp_path):
        pass
    with only_run(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()  # nothing was left in it


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ThreestepError, match="--output_dir .*/file/run cannot be written to .Not a directory"):  # noqa: SIM117
        with only_run(tmp_path / "file" / "run"):
            pass


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def refused(path: str) -> int:
        raise OSError(37, "No locks available", path)

    monkeypatch.setattr(other_runs, "try_lock", refused)
    with only_run(tmp_path), only_run(tmp_path):
        pass


def test_what_trackers_write_is_the_runs_own(tmp_path):
    (tmp_path / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        ThreestepError, match="--output_dir expects a folder of the run's own at .*/tensorboard, or nothing"
    ):
        with only_run(tmp_path):
            pass
