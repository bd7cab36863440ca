"""The log of verdicts: what was asked, what came back, and the number that became of it. It is a run's memory: what it
holds is not asked again, so that a run that resumes, or is replayed, has the same numbers to the bit.

OUTPUT_DIR/verdicts/NAME.rank0.jsonl, a file for each rank; a line for each verdict, as soon as it is there.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.utils.base.credentials import hidden_left_out
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import parse_json, sha256_of_object
from training.utils.run.run_folder import RunLog

FOLDER = "verdicts"
KEY_CHARACTERS = 32  # of the sha256 that stands for a question


class AskedQuestion(NamedTuple):
    """asked: everything on which the verdict depends, as JSON. content: for the request. shown: in errors."""

    asked: Mapping[str, Any]
    content: Any
    shown: str

    @property
    def key(self) -> str:
        return sha256_of_object(dict(self.asked))[:KEY_CHARACTERS]


class Verdict(NamedTuple):
    """value: the verdict as a number. text: that the service wrote, if it wrote some. tokens: that it charged."""

    value: float
    text: str | None = None
    tokens: int = 0


class Spent(NamedTuple):
    requests: int = 0
    tokens: int = 0


class Verdicts:
    """The verdicts of one reward. folder: of the log, None for memory alone. replays: only what is there is given."""

    def __init__(self, name: str, folder: Path | None = None, rank: int = 0, replays: Path | None = None) -> None:
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()
        self._log: RunLog | None = None
        self._written: set[str] = set()
        self.replays = replays
        self.spent_before = Spent()  # by all ranks, before this run
        if folder is not None:
            own = folder / f"{name}.rank{rank}.jsonl"
            folder.mkdir(parents=True, exist_ok=True)
            _cut_last_line(own)
            self._log = RunLog(own)
            self._read(folder, name, rank, is_own=True)
        if replays is not None:
            self._values = {}
            self._read(replays, name, rank, is_own=False)
            if not self._values:
                raise ThreestepError(
                    f"--reward_replay {replays} has no verdicts from the reward '{name}' ({name}.rank0.jsonl); pass "
                    "the folder of the recorded run, and name the reward as in that run"
                )

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str) -> float:
        """The number of a question. Of a replay, it is written to this run's log too."""
        if self.replays is not None:
            self._write(key, {"value": self._values[key], "replayed": True})
        return self._values[key]

    def add(self, question: AskedQuestion, reply: Verdict, requests: int, seconds: float) -> None:
        """Keep a verdict. requests: that were sent for it, those that failed included."""
        key = question.key
        with self._lock:
            self._values[key] = reply.value
        self._write(
            key,
            {"value": reply.value, "reply": reply.text, "asked": question.asked, "requests": requests}
            | {"tokens": reply.tokens, "seconds": round(seconds, 3)},
        )

    def add_failure(self, question: AskedQuestion, reason: str, spent: Spent) -> None:
        """Note a question without an answer. It has no number, and is asked again by a run that resumes."""
        self._write("", {"failed": reason, "asked": question.asked, "requests": spent.requests, "tokens": spent.tokens})

    def _write(self, key: str, line: Mapping[str, Any]) -> None:
        with self._lock:
            if self._log is not None and (not key or key not in self._written):
                self._written.add(key)
                text = json.dumps({"key": key, **line}, ensure_ascii=False, allow_nan=False)
                self._log.append([hidden_left_out(text)])

    def _read(self, folder: Path, name: str, rank: int, *, is_own: bool) -> None:
        """Take what is there; where ranks differ, as a judge that draws its words may, this rank's verdict."""
        requests = tokens = 0
        files = sorted(folder.glob(f"{_plain(name)}.rank*.jsonl"))
        files.sort(key=lambda path: path.name != f"{name}.rank{rank}.jsonl")
        for place, path in enumerate(files):
            for line in _lines(path):
                requests, tokens = requests + _count(line.get("requests")), tokens + _count(line.get("tokens"))
                value, key = line.get("value"), line.get("key")
                if not isinstance(value, (int, float)) or isinstance(value, bool):
                    continue
                if abs(value) <= sys.float_info.max and isinstance(key, str):
                    self._values.setdefault(key, float(value))
                    if is_own and place == 0 and path.name == f"{name}.rank{rank}.jsonl":
                        self._written.add(key)
        if is_own:
            self.spent_before = Spent(requests, tokens)


def folder_of_replay(given: str | Path) -> Path:
    """Return the folder with the verdicts of a run, which is given by its own folder or that of its verdicts."""
    path = Path(given).expanduser()
    inside = path / FOLDER
    found = inside if inside.is_dir() else path
    if not found.is_dir():
        raise ThreestepError(
            f"--reward_replay expects the folder of a run that used a judge or a server, but '{given}' is not a folder"
        )
    return found


def _count(value: Any) -> int:
    """A number of a line; 0 where it is damaged."""
    return value if type(value) is int and 0 <= value < 2**63 else 0


def _plain(name: str) -> str:
    """A name as `glob` takes it."""
    return name.replace("[", "[[]")


def _cut_last_line(path: Path) -> None:
    """Cut off a line that arrived in part."""
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file but those that are damaged."""
    for text in path.read_bytes().split(b"\n"):
        try:
            line = parse_json(text)
        except ValueError:  # the last one of a rank that was killed, or that is writing
            continue
        if isinstance(line, dict):
            yield line
