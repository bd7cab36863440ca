"""The flag for rows split across ranks. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag

FLAG = "--sequence_parallel_size"


@dataclass
class LongRowsArguments:
    """Rows split across ranks."""

    topic: ClassVar[str] = "memory"

    sequence_parallel_size: int = flag(
        1,
        "Ranks that share each row in forward and backward passes: each computes a slice of the row and, in "
        "attention, a share of the heads. The size must divide the number of ranks and every model's number of heads. "
        "Rows are distributed over (ranks / size) groups. In step 3, each rank still generates its own rollouts "
        "(threestep/plugins/long_rows/README.md).",
        "ranks >= 1",
        may_change=True,
    )
