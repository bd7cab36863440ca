"""Tables of a flag's names that plugins add to, and flags that some of their entries alone have. Cheap to import.

An entry is a record with a field `flags`: a dataclass of its own flags, or None. A group of flags that inherits
`flags_of_entries(table)` declares them all; an entry reads its own by `own_options`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from training.utils.base.tables import either
from training.utils.base.user_files import named_object
from training.utils.flags.flags import settings_of
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

_Entry = TypeVar("_Entry")


def with_added(table: str, own: Mapping[str, _Entry], kind: type[_Entry]) -> dict[str, _Entry]:
    """Return the core's entries and those that plugins add: records of a `kind`, or the functions of such. table: of
    `Plugin.tables`."""
    found = {name: named_object(address) for name, address in added(table, own).items()}
    return {**own, **{name: each if isinstance(each, kind) else kind(each) for name, each in found.items()}}  # type: ignore[call-arg]


def flags_of_entries(table: Mapping[str, Any]) -> Any:
    """Return a class that has the flags of all entries."""
    return type(
        "OwnFlags", tuple(dict.fromkeys(entry.flags for entry in reversed([*table.values()]) if entry.flags)), {}
    )


def own_options(entry: Any, flags: Any) -> Any:
    """Return the values of the entry's own flags; None where it has none."""
    return entry.flags and settings_of(entry.flags, flags)


def refuse_flags_of_others(
    table: Mapping[str, Any], given: Iterable[str], flags: Any, of_table: str, *, mistakes: Mistakes
) -> None:
    """Note flags with a value that only entries other than the given ones read. of_table: the flag that takes the
    names."""
    readers: dict[str, list[str]] = {}
    for name, entry in table.items():
        for field in fields(entry.flags) if entry.flags else ():
            readers.setdefault(field.name, []).append(name)
    names = list(given)
    for flag, by in readers.items():
        value = getattr(flags, flag)
        mistakes.require(
            not set(by).isdisjoint(names) or value == type(flags).__dataclass_fields__[flag].default,
            f"--{flag} {value} is for --{of_table} {either(by)}, and it is {', '.join(names)}; leave it out",
        )
