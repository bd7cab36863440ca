"""A planted fault, and what a competent engineer would say of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fault:
    """words: what was planted. quantity: where it must first show; several names: the record may lack the first of
    them. cause: as an engineer would name it. names: a regular expression; a sentence of the judge in which it is found
    names the same mistake."""

    name: str
    words: str
    quantity: tuple[str, ...]
    cause: str
    names: str


@dataclass(frozen=True)
class PlainFault(Fault):
    """setup: fields of `plain.Setup`. replaced: methods of the plain trainer."""

    setup: dict[str, Any] = field(default_factory=dict)
    replaced: dict[str, Any] = field(default_factory=dict)
