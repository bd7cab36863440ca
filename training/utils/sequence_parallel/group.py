"""The ranks that hold slices of the same rows.

DeepSpeed is not told of them: it shards over all ranks and averages over all, which the engine undoes.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from training.utils.base.errors import ThreestepError


@dataclass(frozen=True)
class SequenceGroup:
    """P ranks with neighbouring numbers. size: P. place: this rank's among them. group: torch's; None for P = 1."""

    size: int = 1
    place: int = 0
    group: Any = field(default=None, compare=False, repr=False)


ALONE = SequenceGroup()


def sequence_group(rank: int, world_size: int, size: int, timeout_seconds: float = 1800.0) -> SequenceGroup:
    """Return the group of `size` ranks that `rank` belongs to. A collective: torch makes every group on every rank.

    Raises ThreestepError for a size that does not divide the ranks.
    """
    check_divides(world_size, size)
    if size == 1:
        return ALONE
    timeout = datetime.timedelta(seconds=timeout_seconds)
    groups = [dist.new_group(range(first, first + size), timeout=timeout) for first in range(0, world_size, size)]
    return SequenceGroup(size, rank % size, groups[rank // size])


def check_divides(world_size: int, size: int) -> None:
    """ThreestepError for groups of `size` that do not share out the ranks."""
    if world_size % size:
        divisors = ", ".join(str(each) for each in range(1, world_size + 1) if world_size % each == 0)
        raise ThreestepError(
            f"--sequence_parallel_size expects a divisor of the {world_size} ranks ({divisors}), got {size}: every "
            "group has as many; give one of these, or start other ranks (--num_ranks)"
        )
