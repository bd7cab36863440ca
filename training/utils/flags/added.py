"""Flags that plugins add: to a step, as one group, and with entries of a table that one of its flags names. Cheap to
import: `--help` reaches this module.

An entry is a record with a field `flags`: a dataclass of its own flags, or None. A group of flags that inherits
`flags_of_entries(table)` declares them all; an entry reads its own by `own_options`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from training.utils.base.user_files import either, named_object
from training.utils.flags.flags import settings_of
from training.utils.plugins.registry import added, flag_groups

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes
    from training.utils.plugins.plugin import InPlaceOfRun

_Group = TypeVar("_Group")
_Entry = TypeVar("_Entry")


@dataclasses.dataclass(frozen=True)
class AddedFlags:
    """No flags. What `added_flags` returns has a field for each group of them."""

    def of(self, kind: type[_Group]) -> _Group:
        """Return the group that is a `kind`, or of a subclass; one with the defaults where the step has none."""
        groups = (getattr(self, field.name) for field in dataclasses.fields(self))
        return next((group for group in groups if isinstance(group, kind)), kind())

    def value(self, name: str) -> Any:
        """Return the value of a flag; None where the step has none of this name."""
        groups = (getattr(self, field.name) for field in dataclasses.fields(self))
        return next((getattr(group, name) for group in groups if hasattr(group, name)), None)


NO_FLAGS = AddedFlags()


def added_flags(step: str) -> type[Any]:
    """Return a dataclass of the groups of flags that plugins add to a step. step: its name, such as `step1_sft`, or
    that of another program that takes some, such as `chat`."""
    groups = [(name, group, dataclasses.field(default_factory=group)) for name, group in flag_groups(step).items()]
    return dataclasses.make_dataclass("AddedFlags", groups, bases=(AddedFlags,), frozen=True)


def figures_of_others(settings: Mapping[str, Any]) -> bool:
    """True if a plugin's flag gives evaluations figures of other data than the held-out rows (`evaluation_flags`).
    settings: by the flags' names"""
    return any(settings[name] for name in added("evaluation_flags", ()))


def in_place_of_run(settings: Mapping[str, Any]) -> InPlaceOfRun | None:
    """Return what a step does in place of its run, as a plugin's flag asks; None: it runs. settings: by the flags'
    names"""
    found: dict[str, InPlaceOfRun] = added("in_place_of_run", ())
    return next((entry for name, entry in found.items() if settings.get(name)), None)


def advice(place: str) -> list[str]:
    """Return what plugins say of their flags at a place of the core's messages (`Plugin.tables`)."""
    return [words[place] for words in added("advice", ()).values() if place in words]


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
        for field in dataclasses.fields(entry.flags) if entry.flags else ():
            readers.setdefault(field.name, []).append(name)
    names = list(given)
    for flag, by in readers.items():
        value = getattr(flags, flag)
        mistakes.require(
            not set(by).isdisjoint(names) or value == type(flags).__dataclass_fields__[flag].default,
            f"--{flag} {value} applies only to --{of_table} {either(by)}, not to {', '.join(names)}; remove it",
        )
