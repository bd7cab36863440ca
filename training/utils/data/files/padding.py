"""Nulls with which Arrow, and so `datasets`, pads objects: each object of a column gets the keys of all others.

The keys show whether a JSON file was written from Arrow: all objects at one place, such as a call's arguments, then
have the same keys in the same order. Where the keys differ, the objects are not padded, and a null is a value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_MOST_PLACES = 100_000  # a file whose keys are names of things, such as ids, has places without end
_KEYS_SHOWN = 5


class _Place:
    """The objects at one place of a file. keys: the first one's. below: places by key; those of a list's items by
    None."""

    __slots__ = ("below", "differ", "keys", "nulls")

    def __init__(self) -> None:
        self.keys: tuple[str, ...] | None = None
        self.differ = False
        self.nulls: dict[str, int] = {}
        self.below: dict[str | None, _Place] = {}


class Padding:
    """The keys of the objects at each place below the columns of a file, and the nulls among their values."""

    def __init__(self) -> None:
        self._columns = _Place()
        self._places = 0

    def note(self, row: Mapping[str, Any]) -> None:
        """Take a row into account."""
        for column, value in row.items():
            if isinstance(value, (dict, list)):
                self._note(value, self._below(self._columns, column))

    def _below(self, place: _Place, key: str | None) -> _Place:
        found = place.below.get(key)
        if found is None:
            found = _Place()
            self._places += 1
            if self._places <= _MOST_PLACES:
                place.below[key] = found
        return found

    def _note(self, value: dict[str, Any] | list[Any], place: _Place) -> None:
        if isinstance(value, list):
            inside = self._below(place, None)
            for item in value:
                if isinstance(item, (dict, list)):
                    self._note(item, inside)
            return
        keys = tuple(value)
        if place.keys != keys:
            place.keys, place.differ = place.keys or keys, place.keys is not None
        for key, inner in value.items():
            if inner is None:
                place.nulls[key] = place.nulls.get(key, 0) + 1
            elif isinstance(inner, (dict, list)):
                self._note(inner, self._below(place, key))

    @property
    def nulls(self) -> Counter[str]:
        """The number of nulls that are padding, by key."""
        found: Counter[str] = Counter()
        places = [self._columns] if self._places <= _MOST_PLACES else []
        while places:
            place = places.pop()
            places += place.below.values()
            found.update({} if place.differ else place.nulls)
        return found

    def without(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row without the nulls that are padding; those of columns stay."""
        if not self._places or self._places > _MOST_PLACES:
            return dict(row)
        below = self._columns.below
        return {column: _without(value, below[column]) if column in below else value for column, value in row.items()}


def _without(value: Any, place: _Place) -> Any:
    below = place.below
    if isinstance(value, dict):
        kept = value if place.differ else {key: inner for key, inner in value.items() if inner is not None}
        return {
            key: _without(inner, below[key]) if isinstance(inner, (dict, list)) else inner
            for key, inner in kept.items()
        }
    if isinstance(value, list):
        return [_without(item, below[None]) if isinstance(item, (dict, list)) else item for item in value]
    return value


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
