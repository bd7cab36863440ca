"""A quantity that is judged, and the causes that are computed where it is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from threestep.plugins.audit.quantities.step import AuditedStep

Numbers = Any  # float64 numbers [of the quantity's axis], or one number
FLOAT32 = 1e-5  # relative, of a number that float32 sums up


@dataclass(frozen=True)
class Cause:
    """sentence: what was done in place of the right thing. compute: what then comes out."""

    sentence: str
    compute: Callable[[AuditedStep], Numbers]


@dataclass(frozen=True)
class Quantity:
    """name: of the tensor, or of the figure. compute: from what comes before it. objectives: of records that have it.

    tolerance: how far it may be from the reference by rounding, from the step and the reference.
    counts: which entries are judged; default: all.
    recorded: reads it; default: the tensor of its name, or the figure.
    applies: False for steps whose settings have no such quantity; default: every step of its objectives has it.
    """

    name: str
    objectives: tuple[str, ...]
    compute: Callable[[AuditedStep], Numbers]
    causes: tuple[Cause, ...] = ()
    tolerance: Callable[[AuditedStep, Numbers], Numbers] = lambda step, right: FLOAT32 * (1.0 + np.abs(right))
    counts: Callable[[AuditedStep], np.ndarray] | None = None
    recorded: Callable[[AuditedStep], Numbers] | None = None
    axis: str = ""
    applies: Callable[[AuditedStep], bool] = lambda step: True


def exact(step: AuditedStep, right: Numbers) -> Numbers:
    """No rounding: masks, counts."""
    return np.zeros(np.shape(right))


def of_loss(step: AuditedStep, size: float) -> float:
    """The rounding of a loss whose summands have this size together."""
    return float(step.settings.get("loss_rounding", FLOAT32)) * size + 1e-9
