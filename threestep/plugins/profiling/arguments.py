"""The flag of traces. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag


@dataclass
class ProfilingArguments:
    """Steps to trace."""

    topic: ClassVar[str] = "run"

    profile_steps: list[int] = flag(
        [],
        "Profile these steps (step 3: rollouts) with torch's profiler and write the traces to OUTPUT_DIR/profile.",
        "steps >= 1",
        may_change=True,
    )
