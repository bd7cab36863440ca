"""Nulls with which Arrow, and so `datasets`, pads objects: each object of a column gets the keys of all others.

A file of JSON that was written from Arrow is told by its keys: all objects at one place, such as a call's arguments,
have the same ones in the same order. Where they differ, nobody padded them, and a null is meant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_MOST_PLACES = 100_000  # in a file whose keys are names of things, such as ids, every row has others
_KEYS_SHOWN = 5

# The keys from a column to an object; None for an item of a list.
Place = tuple[str | None, ...]


class Padding:
    """The keys of the objects at each place below the columns of a file, and the nulls among their values."""

    def __init__(self) -> None:
        self._keys: dict[Place, tuple[str, ...] | None] = {}
        self._nulls: dict[Place, Counter[str]] = {}

    def note(self, row: Mapping[str, Any]) -> None:
        """Take a row into account."""
        for column, value in row.items():
            self._note(value, (column,))

    def _note(self, value: Any, place: Place) -> None:
        if isinstance(value, dict):
            keys = tuple(value)
            if self._keys.setdefault(place, keys) != keys or len(self._keys) > _MOST_PLACES:
                self._keys[place] = None
            for key, inner in value.items():
                if inner is None:
                    self._nulls.setdefault(place, Counter())[key] += 1
                else:
                    self._note(inner, (*place, key))
        elif isinstance(value, list):
            for item in value:
                self._note(item, (*place, None))

    def _pads(self, place: Place) -> bool:
        return len(self._keys) <= _MOST_PLACES and self._keys.get(place) is not None

    @property
    def nulls(self) -> Counter[str]:
        """The number of nulls that are padding, by key."""
        return sum((found for place, found in self._nulls.items() if self._pads(place)), Counter[str]())

    def without(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row without the nulls that are padding; those of columns stay."""
        if not self._nulls:
            return dict(row)
        return {column: self._without(value, (column,)) for column, value in row.items()}

    def _without(self, value: Any, place: Place) -> Any:
        if isinstance(value, dict):
            pads = self._pads(place)
            kept = {key: inner for key, inner in value.items() if inner is not None or not pads}
            return {key: self._without(inner, (*place, key)) for key, inner in kept.items()}
        return [self._without(item, (*place, None)) for item in value] if isinstance(value, list) else value


def nulls_sentence(found: Counter[str]) -> str | None:
    """A sentence on nulls that are left out as padding; None if there are none."""
    if not found:
        return None
    keys = ", ".join(f"{count:,} '{key}'" for key, count in found.most_common(_KEYS_SHOWN))
    more = ", ..." if len(found) > _KEYS_SHOWN else ""
    return (
        f"nulls are read as missing keys where all objects have the same keys, as `datasets` pads them: {keys}{more}; "
        "to keep one in a call's arguments, write those as JSON text"
    )
