"""Advice on how many ranks must share a row for a rank's memory to fit its GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from threestep.plugins.plan.dry_run.table import most_at_once
from training.utils.base.console import log_on_main
from training.utils.base.machine import MemoryLine, Moment

if TYPE_CHECKING:
    from threestep.plugins.plan.dry_run.estimate import Estimate
    from training.utils.base.machine import PlannedDevice
    from training.utils.flags.added import AddedFlags
    from training.utils.models.row_sharing import RowSharing

# Of so many ranks that share a row: what is held, and what is held for a while.
Memory = Callable[[int], tuple[Sequence[MemoryLine], Sequence[Moment]]]


def with_sharing(flags: AddedFlags, sharing: RowSharing, size: int) -> AddedFlags:
    """Return the flags with so many ranks that share a row. sharing: as they are"""
    name = sharing.flag.removeprefix("--")
    groups = {field.name: getattr(flags, field.name) for field in fields(flags)}
    return replace(
        flags, **{place: replace(group, **{name: size}) for place, group in groups.items() if hasattr(group, name)}
    )


def print_advice(given: RowSharing, estimate: Estimate, shared_by: Callable[[int], Estimate]) -> None:
    """Print `advised_sharing` of a dry run. shared_by: its estimate with so many ranks that share a row."""

    def memory_of(size: int) -> tuple[Sequence[MemoryLine], Sequence[Moment]]:
        other = estimate if size == given.size else shared_by(size)
        return other.held, other.moments

    sentence = advised_sharing(given, estimate.sharing, memory_of, estimate.device)
    if sentence is not None:
        log_on_main(sentence)


def advised_sharing(given: RowSharing, sizes: Sequence[int], memory_of: Memory, device: PlannedDevice) -> str | None:
    """Return a sentence on the least of `sizes` that fits, a tenth of the GPU left to CUDA; None where that is given,
    where there is no choice, and where the memory is unknown. sizes: in ascending order, that a run could have."""
    if device.memory_bytes is None or len(sizes) == 1:
        return None
    most = 0
    for size in sizes:
        most = max(one.device_bytes for one in most_at_once(*memory_of(size)))
        if device.leaves_room(most):
            share = f"{most / 2**30:.1f} GiB, {most / device.memory_bytes:.0%} of it"
            return None if size == given.size else f"{given.flag} {size} is the smallest that fits: {share}"
    return f"no {given.flag} up to {sizes[-1]} fits: {sizes[-1]} would still need {most / 2**30:.1f} GiB per rank"
