"""Marks of single responses: good or bad, without another one to compare them with.

TRL's and OpenRLHF's `label`, LLaMA-Factory's `kto_tag`; as truth values, numbers or words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.data.sources.formats.records import Record, Roles, value_of

COLUMNS = ("kto_tag", "label")
_GOOD = ("true", "1", "1.0", "yes", "good", "desirable", "chosen", "positive")
_BAD = ("false", "0", "0.0", "-1", "-1.0", "no", "bad", "undesirable", "rejected", "negative")


def read_mark(row: Mapping[str, Any], column: str, where: str) -> bool | None:
    """True if a row's response is marked as good; None without a mark. Raises ThreestepError for any other value."""
    value = value_of(row, column)
    word = str(value).strip().lower()
    if value is None or not word:
        return None
    if not isinstance(value, (bool, int, float, str)) or word not in (*_GOOD, *_BAD):
        raise ThreestepError(
            f"{where}: column '{column}': expected a mark of the response, such as true or false, 1 or 0, desirable or "
            f"undesirable, got {value!r:.60}; name the column of marks with --label_column, which none turns off"
        )
    return word in _GOOD


def reader_of_marked(
    read: Callable[[Mapping[str, Any], Roles, str], Record],
) -> Callable[[Mapping[str, Any], Roles, str], Record]:
    """A reader of rows whose responses are marked: a bad response is the record's rejected one."""

    def read_marked(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
        record = read(row, roles, where)
        return record.as_rejected() if read_mark(row, roles["label"], where) is False else record

    return read_marked
