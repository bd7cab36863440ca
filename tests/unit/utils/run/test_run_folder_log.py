"""Lines that a disk refuses wait, and come whole and in their order."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from training.utils.run import run_folder
from training.utils.run.run_folder import RunLog


class Disk:
    """In the place of `open` in run_folder: takes so many bytes, then refuses."""

    def __init__(self, takes_bytes: int | None) -> None:
        self.takes_bytes = takes_bytes

    def open(self, path: Path, mode: str, buffering: int) -> Any:
        file, disk = open(path, mode, buffering=buffering), self

        class Limited:
            fileno = staticmethod(file.fileno)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *failure: object) -> None:
                file.close()

            def write(self, content: bytes) -> int:
                if disk.takes_bytes is None:
                    return file.write(content)
                if disk.takes_bytes == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written = file.write(content[: disk.takes_bytes])
                disk.takes_bytes -= written
                return written

        return Limited()


@pytest.fixture
def disk(monkeypatch) -> Disk:
    made = Disk(None)
    monkeypatch.setattr(run_folder, "open", made.open, raising=False)
    return made


@pytest.mark.parametrize("takes_bytes", [0, 1, 5])
def test_lines_wait_until_the_disk_takes_them(tmp_path, disk, capsys, takes_bytes):
    lines = RunLog(tmp_path / "metrics.jsonl")
    lines.append(["first"])
    disk.takes_bytes = takes_bytes
    for number in range(3):
        lines.append([f"line {number}"])
    assert lines.path.read_bytes().startswith(b"first\n")
    disk.takes_bytes = None
    lines.append(["last", "ü"])
    assert lines.path.read_text().splitlines() == ["first", "line 0", "line 1", "line 2", "last", "ü"]
    lines.settle()
    assert capsys.readouterr().out.splitlines() == [
        f"warning: {lines.path} cannot be written (No space left on device); its lines wait in memory, and training "
        "goes on",
        f"{lines.path} is complete: the lines that the disk refused before are written",
    ]


def test_what_is_lost_is_said_at_the_end(tmp_path, disk, capsys):
    lines = RunLog(tmp_path / "metrics.jsonl")
    disk.takes_bytes = 0
    lines.append(["a", "b"])
    lines.settle()
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"warning: 2 lines of {lines.path} are lost (No space left on device)"
    )


def test_the_oldest_lines_are_given_up(tmp_path, disk, capsys, monkeypatch):
    monkeypatch.setattr(run_folder, "_MOST_WAITING_BYTES", 10)
    lines = RunLog(tmp_path / "samples.jsonl")
    disk.takes_bytes = 0
    for letter in "abcd":
        lines.append([3 * letter])
    disk.takes_bytes = None
    lines.settle()
    assert lines.path.read_text().splitlines() == ["ccc", "ddd"]
    assert "warning: 2 lines of" in capsys.readouterr().out


def test_a_file_that_was_removed_is_made_again(tmp_path):
    lines = RunLog(tmp_path / "samples.jsonl")
    lines.append(["a"])
    lines.path.unlink()
    lines.append(["b"])
    assert lines.path.read_text() == "b\n"


def test_half_a_surrogate_pair(tmp_path):
    lines = RunLog(tmp_path / "samples.jsonl")
    lines.append(["a\ud83d"])
    assert lines.path.read_text() == "a?\n"
