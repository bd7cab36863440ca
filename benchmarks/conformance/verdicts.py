"""A cell of the table: what several methods saw of one property, and the word that follows. Imports nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

YES, NO, NOT_RUN, DISPUTED = "yes", "no", "not run", "disputed"


@dataclass(frozen=True)
class View:
    """One method's sight of a property. method: the comparison in words. figure: how far it is off, in words."""

    method: str
    holds: bool
    figure: str


@dataclass(frozen=True)
class Cell:
    """answer: yes, no, not run or disputed. views: of the settings that the answer is for. settings: those, if they
    are not the trainer's defaults; by_default: the views with its defaults, if they differ. why: of a cell not run."""

    answer: str
    views: Sequence[View] = ()
    settings: str = ""
    by_default: Sequence[View] = ()
    why: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sight:
    """What a property returns. note: anything a reader should know of how it was seen."""

    views: Sequence[View] = field(default_factory=list)
    note: str = ""


def answer_of(views: Sequence[View]) -> str:
    """yes if all methods say so, no if at least two say no, else disputed: one method alone accuses nobody."""
    against = sum(not view.holds for view in views)
    if not views:
        return NOT_RUN
    if not against:
        return YES
    return NO if against >= 2 else DISPUTED


def size(share: float) -> str:
    """A relative difference in words."""
    if share != share:
        return "not finite"
    if share < 1e-9:
        return "equal"
    if share < 1e-3:
        return f"{share:.0e} of its size"
    return f"{share * 100:.3g} % off" if share < 10 else f"{share:.3g} times its size off"
