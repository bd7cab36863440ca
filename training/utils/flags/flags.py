"""Flags as fields of dataclasses: default, help and the values that each takes; and records made from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

_Settings = TypeVar("_Settings")

AUTO = "auto"  # a flag's value that leaves the choice to the program
# Keys of a field's metadata that argparse must not see (`arguments.StrictParser`).
VALUES, UNIT, TOPIC = OWN_KEYS = ("values", "unit", "topic")


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, both included, and between `above` and `below`, both left out."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        """False for NaN too."""
        return (
            number == number
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"a number from {self.least:g} to {self.most:g}"
        lower = f"more than {self.above:g}" if self.least is None else f"{self.least:g} or more"
        if self.most is not None:
            return f"{lower} and at most {self.most:g}"
        return lower if self.below is None else f"{lower} and less than {self.below:g}"


def flag(
    default: Any,
    help: str,
    *,
    choices: Collection[str] = (),
    aliases: Sequence[str] = (),
    unit: str = "",
    topic: str = "",
    **bounds: float | None,
) -> Any:
    """Return a dataclass field. choices: names, one of which is expected; otherwise bounds as in `Range`. None is not
    checked, and each item of a list is.

    unit: what a number counts, one of `topics.UNITS`; of a text, what it names
    topic: one of `topics.TOPICS`, if not the group's own (`topic` of the dataclass)
    """
    values: Collection[str] | Range | None = choices or None
    if bounds:
        values = Range(**bounds)
    metadata: dict[str, Any] = {"help": help, VALUES: values, UNIT: unit, TOPIC: topic}
    if aliases:
        metadata["aliases"] = list(aliases)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def note_mistakes(group: Any, mistakes: Mistakes) -> None:
    """Note each flag of `group` with a value that it does not take, and what the group's own `validate` finds."""
    for field in dataclasses.fields(group):
        values, got = field.metadata.get(VALUES), getattr(group, field.name)
        if dataclasses.is_dataclass(got):
            note_mistakes(got, mistakes)
        for each in got if isinstance(got, list) else [got]:
            if each is None or values is None:
                continue
            if isinstance(values, Range):
                mistakes.require(each in values, f"--{field.name} expects {values}, got {each}")
            else:
                mistakes.require_one_of(f"--{field.name}", each, values)
    if hasattr(group, "validate"):
        group.validate(mistakes)


def settings_of(kind: type[_Settings], flags: Any, role: str | None = None, **others: Any) -> _Settings:
    """Return a record of `kind`, each field from the flag ROLE_NAME or NAME. others: fields that have no such flag."""
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = next((name for name in (f"{role}_{field.name}", field.name) if hasattr(flags, name)), None)
        if name is not None:
            others.setdefault(field.name, getattr(flags, name))
    return kind(**others)
