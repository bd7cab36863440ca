"""An earlier run in the folder is refused, or removed but for what the new one replaces."""

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
from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.other_runs import check_earlier_run, only_run, remove_earlier_run

FINISHED = r"holds a finished run \({}\); use another .*or add --overwrite to replace"


@pytest.mark.parametrize(
    ("left", "words"),
    [
        *((each, FINISHED.format(each)) for each in ("summary.json", "model/config.json", "model/adapter_config.json")),
        ("checkpoints/step_000003/a", "up to step 3; add --resume to continue it, .* --overwrite to replace"),
    ],
)
def test_an_earlier_run_is_refused(tmp_path, left, words):
    for name in ("notes.txt", "metrics.jsonl"):  # others' files, and of a run that was killed
        (tmp_path / name).write_text("-")
    check_earlier_run(CheckpointFolder(tmp_path), resumes=False)
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("{}")
    with pytest.raises(ThreestepError, match=words):
        check_earlier_run(CheckpointFolder(tmp_path), resumes=False)


@pytest.mark.needs_plugin("audit")
@pytest.mark.needs_plugin("explain")
def test_checkpoints_and_figures_are_removed_and_the_model_stays_until_the_end(tmp_path):
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    kept, removed = {"model", "notes.txt"}, {"checkpoints", "records", "explained"}
    for name in ("model", "records", "explained"):
        (tmp_path / name).mkdir()
    for name in ("summary.json", "reward_report.json", "model/config.json", "notes.txt", "records/a"):
        (tmp_path / name).write_text("{}")
    remove_earlier_run(CheckpointFolder(tmp_path), figures_alone=True)
    assert {path.name for path in tmp_path.iterdir()} == kept | removed
    remove_earlier_run(CheckpointFolder(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == kept
    remove_earlier_run(CheckpointFolder(tmp_path))


def test_a_finished_run_without_checkpoints_is_not_resumed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    check_earlier_run(folder, resumes=True)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(
        ThreestepError,
        match="--resume: .* but no checkpoint to resume from, because it ran without --save_at.*--overwrite",
    ):
        check_earlier_run(folder, resumes=True)
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    check_earlier_run(folder, resumes=True)


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
                f"{about['since']}; wait until it ends, or use another --output_dir"
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


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def refused(path: str) -> int:
        raise OSError(37, "No locks available", path)

    monkeypatch.setattr(other_runs, "try_lock", refused)
    with only_run(tmp_path), only_run(tmp_path):
        pass
