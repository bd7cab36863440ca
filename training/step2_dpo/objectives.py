"""The objective: a weighted sum of losses by name, and beta by the step. Cheap to import: `--help` reaches this
module."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from training.step2_dpo.losses.ranked import LOSSES
from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.plugins.registry import owner_sentence

if TYPE_CHECKING:
    from training.step2_dpo.losses.pairs import Objective

BETA_SCHEDULES = ("linear", "cosine")
_WEIGHT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def weighted_names(text: str) -> dict[str, float]:
    """Return the losses of `--loss_type` with their weights. Raises ThreestepError."""
    found: dict[str, float] = {}
    for entry in text.split(","):
        name, colon, written = entry.strip().partition(":")
        if name not in LOSSES:
            near = owner_sentence("preference_losses", name) or nearest_names(name, list(LOSSES))
            raise ThreestepError(f"--loss_type expects one of {', '.join(LOSSES)}, got '{name}'{near}")
        if name in found:
            raise ThreestepError(f"--loss_type expects each loss once, got '{name}' twice in '{text}'; add the weights")
        if colon and not (_WEIGHT.fullmatch(written) and float(written) > 0):
            raise ThreestepError(f"--loss_type expects a weight above 0 behind '{name}:', got '{written}' in '{text}'")
        found[name] = float(written) if colon else 1.0
    if len({LOSSES[name].rows for name in found}) > 1:
        kinds = ", ".join(f"'{name}' {LOSSES[name].rows}" for name in found)
        raise ThreestepError(f"--loss_type expects losses of one kind of rows, got {kinds} rows in '{text}'")
    return found


class BetaSchedule(NamedTuple):
    """Beta from `first` in the first optimizer step to `last` in the last one. form: of BETA_SCHEDULES."""

    first: float
    last: float
    form: str = "linear"

    def at(self, step: int, total_steps: int) -> float:
        """Beta of an optimizer step, 1 to total_steps, and of evaluations after it; 0 is before the first."""
        share = min(max(step - 1, 0) / max(total_steps - 1, 1), 1.0)
        if self.form == "cosine":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        return self.first + share * (self.last - self.first)


def reads_mismatched(objectives: Sequence[Objective]) -> bool:
    """True if a loss reads prompts with the responses of other rows."""
    return any(one.loss.first_pass is not None and one.loss.first_pass.reads_mismatched for one in objectives)


def at_beta(objectives: Sequence[Objective], beta: float) -> tuple[Objective, ...]:
    """The same with another beta."""
    return tuple(replace(objective, beta=beta) for objective in objectives)
