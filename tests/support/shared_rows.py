"""Ranks that share rows, as a run's flags make them."""

from __future__ import annotations

from training.utils.engine.ranks import startup
from training.utils.engine.ranks.startup import Ranks
from training.utils.flags.added import added_flags
from training.utils.plugins.registry import added


def sharing_rows(ranks: Ranks, size: int) -> Ranks:
    """Return the ranks in groups of `size` that share rows; as they are where no plugin shares any. A collective."""
    flags = added_flags("step1_sft")()
    for name in added("row_sharing", ()):
        for group in vars(flags).values():
            if hasattr(group, name):
                setattr(group, name, size)
    shared = startup.sharing_rows(ranks, flags)
    assert shared.sharing.size == size or not added("row_sharing", ())
    return shared
