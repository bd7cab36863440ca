"""The kinds of training that records know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threestep.plugins.audit.recording.content import StepKind

# A kind is loaded with its first step: the last one imports much of step 3.
_KINDS: Mapping[str, Callable[[], StepKind]] = {
    "sft": lambda: import_module("threestep.plugins.audit.kinds.sft").KIND,
    "reward": lambda: import_module("threestep.plugins.audit.kinds.reward").KIND,
    "dpo": lambda: import_module("threestep.plugins.audit.kinds.dpo").KIND,
    "policy": lambda: import_module("threestep.plugins.audit.kinds.policy").KIND,
}


def kind_of(name: str) -> StepKind | None:
    """Return the kind of training of this name (`StepTaken.kind`); None if records do not know it."""
    return _KINDS[name]() if name in _KINDS else None
