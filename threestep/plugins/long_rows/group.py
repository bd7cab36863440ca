"""The ranks that hold slices of the same rows.

DeepSpeed is not told of them: it shards over all ranks and averages over all, which the engine undoes.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from threestep.plugins.long_rows.arguments import FLAG
from training.utils.base.errors import ThreestepError
from training.utils.models.row_sharing import ALONE, RowSharing


@dataclass(frozen=True)
class SequenceGroup(RowSharing):
    """P ranks with neighbouring numbers. group: torch's; None before they have joined."""

    flag: str = FLAG
    group: Any = field(default=None, compare=False, repr=False)

    def joined(self, rank: int, world_size: int, timeout_seconds: float = 1800.0) -> RowSharing:
        """See `RowSharing.joined`. torch makes every group on every rank."""
        self.check_ranks(world_size)
        if self.size == 1:
            return ALONE
        timeout, size = datetime.timedelta(seconds=timeout_seconds), self.size
        groups = [dist.new_group(range(first, first + size), timeout=timeout) for first in range(0, world_size, size)]
        return replace(self, place=rank % size, group=groups[rank // size])

    def check_ranks(self, ranks: int) -> None:
        """See `RowSharing.check_ranks`."""
        if ranks % self.size:
            divisors = ", ".join(str(each) for each in range(1, ranks + 1) if ranks % each == 0)
            raise ThreestepError(
                f"{FLAG} must divide the {ranks} ranks, got {self.size}; use one of {divisors}, or change the number "
                "of ranks (--num_ranks)"
            )
