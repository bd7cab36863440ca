"""Flags of a step with which parallel paths do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threestep.plugins.parallel_thinking.form import ParallelThinking
from training.utils.plugins.plugin import StepNeeds

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


def check_beside_paths(flags: Any, mistakes: Mistakes) -> None:
    """Note flags of rollouts that drawing paths side by side does not take. flags: a step's `OneModelFlags` or
    `PpoFlags`"""
    settings, thinks = flags.settings, isinstance(flags.data.form, ParallelThinking)
    for name in ("stop", "bad_words"):
        value = settings.get(name)
        mistakes.require(
            not (thinks and value),
            f"--{name} {value} checks a response token by token, but --parallel_thinking generates paths side by "
            "side; leave one of them out",
        )


def needs_of_paths(flags: Any) -> StepNeeds:
    """Return that steps on paths read and learn in forwards of their own. flags: as of `check_beside_paths`"""
    if not isinstance(flags.data.form, ParallelThinking):
        return StepNeeds()
    return StepNeeds(own_forwards="responses have parallel paths (--parallel_thinking)")
