"""The flag of rows over several ranks. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag

FLAG = "--sequence_parallel_size"


@dataclass
class LongRowsArguments:
    """Rows over several ranks."""

    topic: ClassVar[str] = "memory"

    sequence_parallel_size: int = flag(
        1,
        "Ranks that share rows where models read and learn: each computes a slice of every row and, in attention, a "
        "share of the heads. It divides the ranks and the heads of every model; rows are dealt to ranks / this many "
        "groups, and in step 3 each rank draws rollouts of its own (threestep/plugins/long_rows/README.md).",
        "ranks >= 1",
        may_change=True,
    )
