"""The kinds of rows by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.data.kinds.prompts import Prompts
from training.utils.data.kinds.ranked import Marked, Ranked
from training.utils.data.kinds.sentences import Sentences

if TYPE_CHECKING:
    from training.utils.data.kinds.kind import RowKind

KINDS: dict[str, RowKind] = {kind.name: kind for kind in (Sentences(), Ranked(), Marked(), Prompts())}
_OF_PHASES = {1: "sentences", 2: "ranked", 3: "prompts"}


def kind_of(name_or_phase: str | int) -> RowKind:
    """The kind of that name, or the one that a phase trains on unless its step names another."""
    return KINDS[_OF_PHASES[name_or_phase] if isinstance(name_or_phase, int) else name_or_phase]
