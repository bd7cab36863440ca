"""The columns of a file: which are expected, which kinds of values they hold, and the errors about both."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from training.utils.base.errors import ThreestepError

# Column -> kind of value -> where that kind was first met. A null has no kind.
Kinds = dict[str, dict[str, str]]
_NEAR = 0.6  # of difflib


class FileRow(dict[str, Any]):
    """One row of a file; `where` names it in errors: "rows.jsonl, line 7"."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__(values)
        self.where = where


class JoinedRows(Sequence):
    """Several sequences of rows, one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._begins = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._begins[-1]

    def _place(self, index: int) -> tuple[Any, int]:
        """The part that holds a row, and the row's index in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect.bisect_right(self._begins, index) - 1
        return self._parts[part], index - self._begins[part]

    def __getitem__(self, index: Any) -> Any:
        part, inside = self._place(int(index))
        return part[inside]


@dataclass(frozen=True)
class Expected:
    """Requirements of every row of a file.

    required: columns; a mapping gives the flag that names each.
    texts: columns that hold only text or null.
    """

    required: Mapping[str, str] | Sequence[str] = ()
    texts: Sequence[str] = ()


def check_row(row: Any, where: str, expected: Expected | None) -> None:
    """Raise ThreestepError, which begins with `where`, unless `row` is an object and as expected."""
    if not isinstance(row, dict):
        raise ThreestepError(f"{where}: expected a JSON object, got {kind_of(row)}")
    if expected is None:
        return
    for column in expected.required:
        if column not in row:
            raise ThreestepError(_no_column(where, "the row has", column, row, expected=expected))
    for column in expected.texts:
        value = row.get(column)
        if value is not None and not isinstance(value, str):
            raise ThreestepError(f"{where}: column '{column}': expected text, got {kind_of(value)}")


def check_kinds(kinds: Kinds, path: str, expected: Expected | None) -> None:
    """The same for a file whose columns each have one type."""
    for column in expected.required if expected else ():
        if column not in kinds:
            raise ThreestepError(_no_column(path, "the file has", column, kinds, expected=expected))
    for column in expected.texts if expected else ():
        for kind in kinds.get(column, {}):
            if kind != "text":
                raise ThreestepError(f"{path}: column '{column}': expected text, got {kind}")


def _no_column(where: str, has: str, column: str, columns: Mapping[str, Any], *, expected: Expected | None) -> str:
    flags = expected.required if expected else ()
    remedy = f"; name the right one with --{flags[column]}" if isinstance(flags, Mapping) else ""
    return f"{where}: no column '{column}'; {has} {column_names(columns)}{nearest_column(column, columns)}{remedy}"


def note_kinds(kinds: Kinds, row: Mapping[str, Any], where: str) -> None:
    """Add the kinds of a row's values to `kinds`."""
    for column, value in row.items():
        seen = kinds.setdefault(column, {})
        if value is not None and (kind := kind_of(value)) not in seen:
            seen[kind] = where


def kind_of(value: Any) -> str:
    """A value's kind in words: errors quote it, and formats are recognised by it."""
    if isinstance(value, bool):
        return "a truth value"
    names = {list: "a list", dict: "an object", str: "text", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")


def folded(column: str) -> str:
    """A column's name without capitals and outer blanks, by which `Question` is found where `question` is meant."""
    return column.strip().lower()


def nearest_column(column: str, columns: Iterable[str]) -> str:
    """The closest of a file's columns, as `nearest_names` without its question mark; "" if none is close."""
    by_folded = {folded(name): name for name in columns}
    close = difflib.get_close_matches(folded(column), by_folded, 1, _NEAR)
    return f"; did you mean '{by_folded[close[0]]}'" if close else ""


def column_names(columns: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(columns)) or "no columns"
