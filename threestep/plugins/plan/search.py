"""The search: every choice's memory, and the seconds of those that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from threestep.plugins.plan.choices import Choice, Settings, Wanted, ladders, settings_of, ways_of_drawing
from threestep.plugins.plan.dry_run.estimate import ROLLING_OUT
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from threestep.plugins.plan.clock.training_step import Parts
    from threestep.plugins.plan.dry_run.estimate import Estimate
    from training.utils.base.machine import MemoryLine

GIB = 2**30
Estimates = Callable[[Settings], "Estimate"]


class Tried(NamedTuple):
    """A choice, and what its dry run says. parts: seconds by part; None if it does not fit."""

    choice: Choice
    settings: Settings
    memory: MemoryLine
    parts: Parts | None = None

    @property
    def seconds(self) -> float:
        return float("inf") if self.parts is None else sum(self.parts.values())


def search(wanted: Wanted, estimates: Estimates) -> list[Tried]:
    """Every choice that was tried, the fastest first, and those that do not fit at the end. Micro-batches grow until
    training does not fit."""
    tried: list[Tried] = []
    for ladder in ladders(wanted):
        for choice in ladder:
            found, trains = _with_each_drawing(choice, wanted, estimates)
            tried += found
            if not trains:
                break
    return sorted(tried, key=lambda one: (one.seconds, one.memory.device_bytes))


def _with_each_drawing(choice: Choice, wanted: Wanted, estimates: Estimates) -> tuple[list[Tried], bool]:
    """The choice with every way of drawing, in as few batches as fit; and whether training fits."""
    found: list[Tried] = []
    for drawing in ways_of_drawing(wanted):
        one = None
        for settings in settings_of(choice._replace(drawing=drawing), wanted):
            estimate = estimates(settings)
            memory = estimate.most()
            one = Tried(choice._replace(drawing=drawing), settings, memory)
            if not fits(estimate.most(without=ROLLING_OUT), wanted):
                return [*found, one], False
            if fits(memory, wanted):
                one = one._replace(parts=estimate.parts())
                break
        if one is not None:
            found.append(one)
    return found, True


def fits(memory: MemoryLine, wanted: Wanted) -> bool:
    """Return whether a rank has room for it."""
    return wanted.gpu.leaves_room(memory.device_bytes) and memory.host_bytes <= wanted.host_bytes


def best_of(tried: list[Tried], wanted: Wanted, most: int = 3) -> list[Tried]:
    """The fastest ones that fit. ThreestepError, with what is missing, if none does."""
    found = [one for one in tried if one.parts is not None][:most]
    if not found:
        raise ThreestepError(missing(tried, wanted))
    return found


def missing(tried: list[Tried], wanted: Wanted) -> str:
    """One sentence on why nothing fits."""
    if wanted.sequences % wanted.ranks:
        return (
            f"--sequences_per_step {wanted.sequences} must be a multiple of the {wanted.ranks} ranks; change it or "
            "--gpus"
        )
    where = f"{wanted.ranks} x {wanted.device}"
    if not tried:
        return f"no rollout engine fits {where}; use more --gpus, GPUs with more memory, or shorter sequences"
    room, host = wanted.gpu.room_bytes, wanted.host_bytes
    closest = min(tried, key=lambda one: max(one.memory.device_bytes / room, one.memory.host_bytes / host))
    needs = ((closest.memory.device_bytes, room, "GPU"), (closest.memory.host_bytes, host, "host"))
    lacks = [
        (
            f"{need / GIB:,.1f} GiB of {place} memory but a rank has {has / GIB:,.1f} GiB ({(need - has) / GIB:,.1f} "
            "GiB short)"
        )
        for need, has, place in needs
        if need > has
    ]
    return (
        f"nothing fits {where}: the closest setting ({closest.choice.words}) needs {' and '.join(lacks)}; use more "
        "--gpus, GPUs with more memory, or shorter sequences"
    )
