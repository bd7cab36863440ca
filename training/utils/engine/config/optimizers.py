"""The table of optimizers, by the names that --optimizer takes. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from typing import NamedTuple

from training.utils.plugins.plugin import OptimizerEntry
from training.utils.plugins.registry import added

ADAMW = "adamw"
OPTIMIZERS = {ADAMW: OptimizerEntry("training.utils.engine.optimizers:adamw", states=2, states_name="AdamW's moments")}
OPTIMIZERS |= added("optimizers", OPTIMIZERS)


class OptimizerSettings(NamedTuple):
    """Settings of an optimizer, beside the groups of its weights. learning_rate: the schedule's peak."""

    learning_rate: float
    betas: tuple[float, float]
    epsilon: float


def states_of(name: str) -> tuple[int, str]:
    """Return how many numbers an optimizer keeps of each weight, and a name for them."""
    entry = OPTIMIZERS[name]
    return entry.states, entry.states_name or f"states of {name}"
