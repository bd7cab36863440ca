"""Recognition of a data source: its format and why, which columns are read, and which are not.

Serves the log of a build, and programs that show data before training. Knows nothing of how rows are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from training.utils.data.files.columns import Kinds, column_names

NOT_READ = "; not read: "  # before the columns, in a sentence
_MAY_HOLD_TEXT = ("text", "a list", "an object")


@dataclass(frozen=True)
class Recognition:
    """One source's format and columns.

    format: a name of `--data_format`.
    why: the columns or the flags that decided on it.
    read: column -> its role, such as "prompt"; "extra_info.answer" is a part of a column.
    texts_not_read: columns that hold text, lists or objects and are not read.
    others_not_read: all further columns, of numbers and truth values.
    notes: sentences on files, or values in them, that are passed over.
    """

    format: str
    why: str
    read: dict[str, str]
    texts_not_read: tuple[str, ...] = ()
    others_not_read: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """One line for a log. Columns of text alone are named as not read: an id or a score is no text to learn."""
        columns = ", ".join(f"{role} '{column}'" for column, role in self.read.items())
        unread = f"{NOT_READ}{column_names(self.texts_not_read)}" if self.texts_not_read else ""
        return f"read as {self.format} because of {self.why}: {columns}{unread}"

    def as_json(self) -> dict[str, Any]:
        """All fields and the sentence as JSON values."""
        lists = {name: list(getattr(self, name)) for name in ("texts_not_read", "others_not_read", "notes")}
        return {**asdict(self), **lists, "sentence": self.sentence}


def recognition_of(kinds: Kinds, name: str, why: str, read: Iterable[tuple[str, str]]) -> Recognition:
    """The record of a file with these columns, of which `read` names some, or parts of some: (column, role)."""
    by_column = dict(read)
    heads = {*by_column, *(column.partition(".")[0] for column in by_column)}
    unread = [column for column in kinds if column not in heads]
    texts = tuple(column for column in unread if any(kind in _MAY_HOLD_TEXT for kind in kinds[column]))
    return Recognition(name, why, by_column, texts, tuple(column for column in unread if column not in texts))
