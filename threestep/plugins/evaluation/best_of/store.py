"""Responses of a run of best of n on disk: one file a batch until all are there, then one file.

A batch file is complete or not there (written beside, flushed, renamed), so that a run that is killed at any point
loses at most the batches that were being drawn. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from training.utils.base.errors import ThreestepError
from training.utils.base.reading import checked_json, read_text, text_if_there
from training.utils.base.storage import flush_to_disk, remove

ANSWERS = "answers.jsonl"  # a prompt a line, once all batches are drawn
_SETTINGS = "settings.json"
_BATCHES = "batches"
RESULTS = ("best_of.json", "best_of.html", "rows.jsonl")

Drawn = dict[str, Any]  # a prompt with its responses and their scores


class _DrawnLine(TypedDict):
    """The fields of a prompt that results need, as `drawing` has it. check: of a checker."""

    prompt_index: int
    prompt: str | list[dict[str, Any]]
    ground_truth: Any
    data_source: Any
    responses: list[str]
    ended: list[bool]
    reward: list[float]
    check: NotRequired[list[float]]


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
        earlier = self._earlier_settings(path)
        if earlier is not None and earlier != plain:
            names = [name for name in {**earlier, **plain} if earlier.get(name) != plain.get(name)]
            differ = "; ".join(f"{name} changed from {earlier.get(name)} to {plain.get(name)}" for name in names)
            raise ThreestepError(
                f"--output_dir {self.folder} holds responses generated with other settings: {differ}; restore those "
                "settings, use another --output_dir, or add --overwrite to start over"
            )
        _write_whole(path, json.dumps(plain, indent=2) + "\n")
        (self.folder / _BATCHES).mkdir(exist_ok=True)

    def _earlier_settings(self, path: Path) -> dict[str, Any] | None:
        """None in a folder without responses."""
        try:
            text = text_if_there(path)
            if text is not None:
                return dict(checked_json(dict[str, Any], text, path))
            if (self.folder / ANSWERS).exists() or any((self.folder / _BATCHES).glob("*.jsonl")):
                raise ThreestepError(f"--output_dir {self.folder} holds responses but no {_SETTINGS}")
        except ThreestepError as problem:
            raise ThreestepError(f"{problem}; use another --output_dir, or add --overwrite to start over") from problem
        return None

    def missing(self, batches: Sequence[range]) -> list[int]:
        """The batches that are still to be drawn."""
        if (self.folder / ANSWERS).exists():
            return []
        return [number for number in range(len(batches)) if not self._place(number).exists()]

    def add(self, number: int, drawn: Sequence[Drawn]) -> None:
        """Keep a batch."""
        _write_whole(self._place(number), _lines(drawn))

    def close(self, batches: Sequence[range]) -> list[Drawn]:
        """Return the answers to all prompts, in their order, and keep them in one file. ThreestepError for a file that
        holds anything else."""
        path = self.folder / ANSWERS
        is_closed = path.exists()
        files = [path] if is_closed else [self._place(number) for number in range(len(batches))]
        found, texts = list[Drawn](), list[str]()
        for file, places in zip(files, [range(batches[-1].stop)] if is_closed else batches, strict=True):
            try:
                texts.append(read_text(file))
                found += _drawn_in(texts[-1], places, file)
                _check_alike(found[-len(places) :], found[0], file)
            except ThreestepError as problem:
                raise ThreestepError(f"{problem}; remove this file to generate its responses again") from problem
        if not is_closed:
            _write_whole(path, "".join(texts))
        remove(self.folder / _BATCHES)
        return found

    def _place(self, number: int) -> Path:
        return self.folder / _BATCHES / f"{number:06d}.jsonl"


def _drawn_in(text: str, places: range, path: Path) -> list[Drawn]:
    """Return the prompts in a file, which are those at `places`."""
    lines = [line for line in text.split("\n") if line]
    found = [dict(checked_json(_DrawnLine, line, f"{path}, line {n}")) for n, line in enumerate(lines, start=1)]
    if [prompt["prompt_index"] for prompt in found] != list(places):
        raise ThreestepError(f"{path} should hold prompts {places.start:,} to {places.stop - 1:,}, one per line")
    return found


def _check_alike(found: Sequence[Drawn], first: Drawn, path: Path) -> None:
    """ThreestepError unless these prompts have as many responses as the first, and each of them finite scores."""
    for prompt in found:
        values = [prompt[name] for name in ("ended", "reward", "check") if name in prompt]
        is_alike = prompt.keys() == first.keys() and len(prompt["responses"]) == len(first["responses"]) > 0
        is_finite = all(math.isfinite(value) for each in values for value in each)
        if not (is_alike and is_finite and all(len(each) == len(prompt["responses"]) for each in values)):
            raise ThreestepError(
                f"{path} should hold one finite score per response and the same number of responses per prompt"
            )


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
