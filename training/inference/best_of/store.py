"""Responses of a run of best of n on disk: one file a batch until all are there, then one file.

A batch file is complete or not there (written beside, flushed, renamed), so that a run that is killed at any point
loses at most the batches that were being drawn. Knows nothing of models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import flush_to_disk, read_json_object, remove

ANSWERS = "answers.jsonl"  # a prompt a line, once all batches are drawn
_SETTINGS = "settings.json"
_BATCHES = "batches"
RESULTS = ("best_of.json", "best_of.html", "rows.jsonl")

Drawn = dict[str, Any]  # a prompt with its responses and their scores


class AnswerStore:
    """The answers below OUTPUT_DIR. One process opens it; any may add batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, settings: Mapping[str, Any], overwrite: bool) -> None:
        """Write the settings that the answers depend on. ThreestepError, which names the settings, if the folder has
        answers of others. overwrite: remove these."""
        path = self.folder / _SETTINGS
        plain = json.loads(json.dumps(settings))
        if overwrite:
            for name in (ANSWERS, _BATCHES, _SETTINGS, *RESULTS):
                remove(self.folder / name)
        earlier = read_json_object(str(path))
        if earlier is not None and earlier != plain:
            names = [name for name in {**earlier, **plain} if earlier.get(name) != plain.get(name)]
            differ = "; ".join(f"{name} was {earlier.get(name)} and is {plain.get(name)}" for name in names)
            raise ThreestepError(
                f"--output_dir {self.folder} holds responses that were drawn with other settings: {differ}; restore "
                "them, give another --output_dir, or --overwrite to draw again"
            )
        (self.folder / _BATCHES).mkdir(exist_ok=True)
        _write_whole(path, json.dumps(plain, indent=2) + "\n")

    def missing(self, batches: Sequence[range]) -> list[int]:
        """The batches that are still to be drawn."""
        if (self.folder / ANSWERS).exists():
            return []
        return [number for number in range(len(batches)) if not self._place(number).exists()]

    def add(self, number: int, drawn: Sequence[Drawn]) -> None:
        """Keep a batch."""
        _write_whole(self._place(number), _lines(drawn))

    def close(self, batches: Sequence[range]) -> list[Drawn]:
        """Return the answers to all prompts, in their order, and keep them in one file."""
        path = self.folder / ANSWERS
        if not path.exists():
            _write_whole(path, "".join(self._place(number).read_text("utf-8") for number in range(len(batches))))
        remove(self.folder / _BATCHES)
        return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]

    def _place(self, number: int) -> Path:
        return self.folder / _BATCHES / f"{number:06d}.jsonl"


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write JSON lines in place of what is there."""
    _write_whole(path, _lines(rows))


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is complete or not there, also after a loss of power."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    flush_to_disk(beside)
    os.replace(beside, path)
    flush_to_disk(path.parent)
