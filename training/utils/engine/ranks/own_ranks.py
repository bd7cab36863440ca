"""Agreement of a run's ranks in a group of their own: a thread that draws ahead of training may call it while training
calls others."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from training.utils.engine.ranks.collectives import several_ranks

Given = TypeVar("Given")
_LONGEST_WAIT = timedelta(days=1)  # for the rank whose rollout takes longest


class OwnRanks:
    """All ranks make it together, and call its methods together, in one order."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if several_ranks() else 0
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT) if several_ranks() else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gathered(self, own: Given) -> list[Given]:
        """Return what each rank gave, once all have."""
        if self._group is None:
            return [own]
        found: list[Given] = [own] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self._group)
        return found

    def from_first(self, own: Given) -> Given:
        """Return what the first rank gave; what others give is not looked at."""
        if self._group is None:
            return own
        found = [own]
        dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]
