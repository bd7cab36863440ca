"""Learning-rate schedules as pure numbers: which share of its peak the rate has at a step.

Where no floor is given, these are transformers' of the same name, to the bit; with one,
verl's. The rest of transformers' schedules are taken from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleShape:
    """warmup_steps: over which the rate rises in a straight line from 0 to 1.
    total_steps: of the run, warm-up included.
    min_lr_ratio: the floor.
    stable_ratio: the part of the steps after warm-up that wsd stays at 1.
    """

    warmup_steps: int
    total_steps: int
    min_lr_ratio: float = 0.0
    stable_ratio: float = 0.9


def share_of_peak(step: int, shape: ScheduleShape, after_warmup: Callable[[int, ScheduleShape], float]) -> float:
    """Return the rate of `step` (from 0) over its peak: step / warm-up, and then what `after_warmup`
    makes of the steps since, with the floor m: m + (1 - m) x its value, which is from 0 to 1."""
    if step < shape.warmup_steps:
        return step / shape.warmup_steps
    share = max(0.0, after_warmup(step - shape.warmup_steps, shape))
    return shape.min_lr_ratio + (1.0 - shape.min_lr_ratio) * share


def constant(step: int, shape: ScheduleShape) -> float:
    """Return 1."""
    return 1.0


def linear(step: int, shape: ScheduleShape) -> float:
    """Return 1 - t, t the part of the steps after warm-up that is over."""
    steps = shape.total_steps - shape.warmup_steps
    return (steps - step) / max(1, steps)


def cosine(step: int, shape: ScheduleShape) -> float:
    """Return (1 + cos(pi t)) / 2, t as in `linear` (Loshchilov and Hutter 2017, equation 5)."""
    return _half_wave(step / max(1, shape.total_steps - shape.warmup_steps))


def wsd(step: int, shape: ScheduleShape) -> float:
    """Return 1 over the stable part, then the cosine over the rest, then 0: warm-up, stable, decay (Hu et al. 2024,
    MiniCPM, section 4.2), the decay in verl's form."""
    steps = max(0, shape.total_steps - shape.warmup_steps)
    stable = int(steps * shape.stable_ratio)
    if step < stable:
        return 1.0
    return _half_wave((step - stable) / max(1, steps - stable)) if step < steps else 0.0


def _half_wave(part: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * part))


@dataclass(frozen=True)
class Schedule:
    """after_warmup: as `share_of_peak` takes it. reads: the settings besides warm-up and total steps."""

    after_warmup: Callable[[int, ScheduleShape], float]
    reads: tuple[str, ...] = ()


OWN_SCHEDULES = {
    "linear": Schedule(linear, ("min_lr_ratio",)),
    "cosine": Schedule(cosine, ("min_lr_ratio",)),
    "wsd": Schedule(wsd, ("min_lr_ratio", "stable_ratio")),
    "constant": Schedule(constant),
    "constant_with_warmup": Schedule(constant),
}
# Of transformers.get_scheduler, those that need nothing but warm-up and total steps.
SCHEDULES = (*OWN_SCHEDULES, "cosine_with_restarts", "polynomial", "inverse_sqrt")
