"""Learning-rate schedules as pure numbers: which share of its peak the rate has at a step.

Where no floor, start or number of cycles is given, these are transformers' of the same name, to the bit; with them,
verl's. The rest of transformers' schedules are taken from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleShape:
    """warmup_steps: over which the rate rises in a straight line from init_lr_ratio to 1.
    total_steps: of the run, warm-up included.
    min_lr_ratio: the floor. num_cycles: waves of the cosine; 0.5 falls once.
    stable_ratio: the part of the steps after warm-up that wsd stays at 1.
    """

    warmup_steps: int
    total_steps: int
    min_lr_ratio: float = 0.0
    init_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    stable_ratio: float = 0.9


def share_of_peak(step: int, shape: ScheduleShape, after_warmup: Callable[[int, ScheduleShape], float]) -> float:
    """Return the rate of `step` (from 0) over its peak: init + (1 - init) step / warm-up, and then what `after_warmup`
    makes of the steps since, with the floor m: m + (1 - m) x its value, which is from 0 to 1."""
    if step < shape.warmup_steps:
        return shape.init_lr_ratio + (1.0 - shape.init_lr_ratio) * (step / shape.warmup_steps)
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
    """Return (1 + cos(2 pi cycles t)) / 2, t as in `linear` (Loshchilov and Hutter 2017, equation 5, for half a
    cycle)."""
    return _wave(step / max(1, shape.total_steps - shape.warmup_steps), shape)


def wsd(step: int, shape: ScheduleShape) -> float:
    """Return 1 over the stable part, then the cosine over the rest, then 0: warm-up, stable, decay (Hu et al. 2024,
    MiniCPM, section 4.2), the decay in verl's form."""
    steps = max(0, shape.total_steps - shape.warmup_steps)
    stable = int(steps * shape.stable_ratio)
    if step < stable:
        return 1.0
    return _wave((step - stable) / max(1, steps - stable), shape) if step < steps else 0.0


def _wave(part: float, shape: ScheduleShape) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * shape.num_cycles * 2.0 * part))


@dataclass(frozen=True)
class Schedule:
    """after_warmup: as `share_of_peak` takes it. reads: the settings besides warm-up and total steps."""

    after_warmup: Callable[[int, ScheduleShape], float]
    reads: tuple[str, ...]


OWN_SCHEDULES = {
    "linear": Schedule(linear, ("init_lr_ratio", "min_lr_ratio")),
    "cosine": Schedule(cosine, ("init_lr_ratio", "min_lr_ratio", "num_cycles")),
    "wsd": Schedule(wsd, ("init_lr_ratio", "min_lr_ratio", "num_cycles", "stable_ratio")),
    "constant": Schedule(constant, ("init_lr_ratio",)),
    "constant_with_warmup": Schedule(constant, ("init_lr_ratio",)),
}
# Of transformers.get_scheduler, those that need nothing but warm-up and total steps.
SCHEDULES = (*OWN_SCHEDULES, "cosine_with_restarts", "polynomial", "inverse_sqrt")
