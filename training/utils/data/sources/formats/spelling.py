"""Columns whose names nearly fit a format: in capitals or with blanks around them, which are read, and misspelt, which
errors name. Knows nothing of what the formats are."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

from training.utils.base.errors import ThreestepError
from training.utils.data.files.columns import Kinds, folded

_CHOICES = ("choices", "options")  # beside which a number is an answer's place, not the answer
_NEAR = 0.7  # of difflib: `questoin` is near `question`, `title` is near nothing


def as_formats_spell(kinds: Kinds, fits: Callable[[Kinds], bool]) -> dict[str, str]:
    """A column's name as formats spell it -> the file's: `question` -> `Question`, where `fits` takes those alone;
    otherwise each name is its own."""
    plain = {folded(column): column for column in kinds}
    if len(plain) == len(kinds) and not fits(kinds) and fits({name: kinds[plain[name]] for name in plain}):
        return plain
    return {column: column for column in kinds}


def nearest_format(kinds: Iterable[str], needs: Mapping[str, str]) -> str:
    """A remark on the format whose columns the file nearly has; "" if there is none. needs: the columns of each."""
    by_folded = {folded(column): column for column in kinds}
    for name, columns in needs.items():
        near = {
            column: difflib.get_close_matches(column, by_folded, 1, _NEAR)
            for column in columns.split(", ")
            if column not in by_folded
        }
        if len(near) < len(columns.split(", ")) and all(near.values()):
            meant = " and ".join(f"'{by_folded[given[0]]}' is its '{column}'" for column, given in near.items())
            return f"; the nearest is {name}, if {meant}"
    return ""


def check_numbers(kinds: Kinds, column: str) -> None:
    """ThreestepError if a column of answers holds numbers that may be places in a list of choices."""
    where = kinds.get(column, {}).get("a number")
    beside = next((name for name in kinds if folded(name) in _CHOICES), None)
    if where and beside:
        raise ThreestepError(
            f"{where}: column '{column}' holds numbers beside '{beside}', so they may be places in it; write each "
            "answer as text into a column, and name that with --chosen_column"
        )
