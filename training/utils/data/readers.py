"""Local files as raw datasets: JSON lines and JSON lists. A wrong row is one error that names file and line.

Texts are taken as stored; nothing is added to them, so a response that should start with a space is stored
with it.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.utils.data.fingerprint import digest_files
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.run.errors import ThreestepError


@dataclass(frozen=True)
class Columns:
    """Which column holds which text; the default names may be missing, a name that was asked for may not."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = None


class JsonLines(Sequence):
    """The objects of a JSON-lines file, parsed when asked for; only where each line begins is kept in memory.

    The constructor reads the whole file once and raises ThreestepError at the first row that is not an
    object, lacks a `required` column, or holds something else than text or null in a `text_columns` column.
    `columns` are the names met in any row. Blank lines are passed over.
    """

    def __init__(
        self, path: str, required: Mapping[str, str] | Sequence[str], text_columns: Sequence[str]
    ) -> None:
        self.path = path
        self.columns: set[str] = set()
        self._begins = array("q")
        self._file = open(path, "rb")  # noqa: SIM115 (read again by every __getitem__)
        begin = 0
        for line_number, line in enumerate(self._file, start=1):
            if line.strip():
                row = _parse(line, f"{path}, line {line_number}")
                _check_row(row, f"{path}, line {line_number}", required, text_columns)
                self.columns.update(row)
                self._begins.append(begin)
            begin += len(line)
        self._end = begin

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index):
        place = range(len(self))[int(index)]
        begin = self._begins[place]
        end = self._begins[place + 1] if place + 1 < len(self) else self._end
        # Not seek and read: forked workers share the place in the file, and would move it for each other.
        return _parse(os.pread(self._file.fileno(), end - begin, begin), self.path)


class JsonList(Sequence):
    """The objects of a file that holds one JSON list; the same checks and attributes as `JsonLines`."""

    def __init__(
        self, path: str, required: Mapping[str, str] | Sequence[str], text_columns: Sequence[str]
    ) -> None:
        self.path = path
        self.columns: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        with open(path, "rb") as file:
            text = _decode(file.read(), path)
        for row, line_number in _items(text, path):
            _check_row(row, f"{path}, line {line_number}", required, text_columns)
            self.columns.update(row)
            self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[int(index)]


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ThreestepError(f"{where}: expected UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(line: bytes, where: str) -> Any:
    text = _decode(line, where)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ThreestepError(
            f"{where}: expected one JSON object, got text that is not JSON ({error.msg} at column "
            f"{error.colno}): "
            f"{text.strip()[:60]!r}"
        ) from error


def _items(text: str, path: str) -> Iterator[tuple[Any, int]]:
    """Each item of a JSON list with the number of the line it begins on."""
    blanks = " \t\r\n"
    decoder = json.JSONDecoder()

    def skip(position: int) -> int:
        while position < len(text) and text[position] in blanks:
            position += 1
        return position

    position = skip(0)
    if text[position : position + 1] != "[":
        raise ThreestepError(
            f"{path}, line 1: expected one JSON list of objects, got {text[position : position + 40]!r}; "
            f"for one object a line write jsonl:{path}"
        )
    position = skip(position + 1)
    line_number, counted = 1, 0
    while text[position : position + 1] != "]":
        line_number += text.count("\n", counted, position)
        counted = position
        try:
            item, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ThreestepError(
                f"{path}, line {error.lineno}: expected a JSON object, got text that is not JSON "
                f"({error.msg})"
            ) from error
        yield item, line_number
        position = skip(position)
        if text[position : position + 1] == ",":
            position = skip(position + 1)
        elif text[position : position + 1] != "]":
            at_line = 1 + text.count("\n", 0, position)
            raise ThreestepError(f"{path}, line {at_line}: the JSON list breaks off or lacks a comma here")


def _check_row(
    row: Any, where: str, required: Mapping[str, str] | Sequence[str], text_columns: Sequence[str]
) -> None:
    """`required`: columns, as a mapping to the flags that name them where there are such flags."""
    if not isinstance(row, dict):
        raise ThreestepError(f"{where}: expected a JSON object, got {_kind(row)}")
    for column in required:
        if column not in row:
            remedy = (
                f"; name the right one with --{required[column]}" if isinstance(required, Mapping) else ""
            )
            raise ThreestepError(f"{where}: no column '{column}'; the row has {_names(row)}{remedy}")
    for column in text_columns:
        value = row.get(column)
        if value is not None and not isinstance(value, str):
            raise ThreestepError(f"{where}: column '{column}': expected text, got {_kind(value)}")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a truth value"
    names = {list: "a list", dict: "an object", str: "text", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _names(columns: Sequence[str] | dict[str, Any] | set[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(columns)) or "no columns"


READERS: dict[str, Callable[..., JsonLines | JsonList]] = {"jsonl": JsonLines, "json": JsonList}


class LocalFileDataset(PromptRawDataset):
    """`jsonl:PATH` and `json:PATH`: prompt, chosen and rejected texts in columns; opened when rows are
    asked for.
    """

    def __init__(self, name: str, reader: str, path: str, columns: Columns) -> None:
        self.dataset_name = name
        self.dataset_clean_name = name.replace("/", "_").replace(":", "_")
        self._reader = reader
        self._path = path
        self._columns = columns
        self._rows: JsonLines | JsonList | None = None

    def get_train_data(self) -> JsonLines | JsonList:
        if self._rows is None:
            names = self._columns
            self._rows = READERS[self._reader](
                self._path, {names.prompt: "prompt_column"}, (names.prompt, names.chosen, names.rejected)
            )
        return self._rows

    def get_prompt(self, sample: dict[str, Any]) -> str | None:
        return sample[self._columns.prompt]

    def get_chosen(self, sample: dict[str, Any]) -> str | None:
        return sample.get(self._columns.chosen)

    def get_rejected(self, sample: dict[str, Any]) -> str | None:
        return sample.get(self._columns.rejected)

    def get_margin(self, sample: dict[str, Any]) -> Any:
        return sample.get(self._columns.margin) if self._columns.margin is not None else None

    def get_fingerprint(self) -> str:
        return digest_files([self._path], memo_dir=None)

    def check_phase(self, phase: int) -> None:
        """A column that a phase needs must be there: `chosen` in phases 1 and 2.

        A file without the default `rejected` column is let pass (its rows are dropped from phase 2 and
        counted, other datasets may have pairs), one without a `rejected` column that was asked for by name
        is not.
        """
        needed = {1: ["chosen"], 2: ["chosen"], 3: []}[phase]
        if phase == 2 and self._columns.rejected != Columns.rejected:
            needed.append("rejected")
        if phase == 2 and self._columns.margin is not None:
            needed.append("margin")
        have = self.get_train_data().columns
        for kind in needed:
            column = getattr(self._columns, kind)
            if len(self.get_train_data()) and column not in have:
                raise ThreestepError(
                    f"{self._path}: phase {phase} needs the column '{column}' and no row has it; the "
                    "columns are "
                    f"{_names(have)}; name the right one with --{kind}_column"
                )
