"""The flags that plugins add to a step, as one group. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from training.utils.plugins.registry import added, flag_groups

if TYPE_CHECKING:
    from training.utils.plugins.plugin import InPlaceOfRun

_Group = TypeVar("_Group")


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
