"""Flags: how often machines fail, and how long a run then stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from threestep.plugins.plan.failures import (
    FAILURES_PER_GPU_HOUR,
    RESTART_SECONDS,
    SAVED_GB_PER_SECOND,
    SLOW_NODES,
    SLOWER_BY,
    Reliability,
)
from training.utils.flags.flags import flag


@dataclass
class FailureArguments:
    """Rates of failures, as published for others' clusters."""

    topic: ClassVar[str] = "checkpoints"

    failures_per_gpu_hour: float = flag(
        FAILURES_PER_GPU_HOUR, "Failures of one GPU, with its share of all else, in an hour; default: Llama 3's.",
        "rate > 0",
    )  # fmt: skip
    restart_seconds: float = flag(
        RESTART_SECONDS, "From a failure until a checkpoint is read again; default: MegaScale's.", "seconds >= 0"
    )
    saved_gb_per_second: float = flag(
        SAVED_GB_PER_SECOND,
        "Rate at which each GPU's share of a checkpoint is written (1e9 bytes); default: Llama 3's storage.",
        "gigabytes > 0",
    )
    slow_nodes: float = flag(
        SLOW_NODES, f"Share of nodes that are slower than others, by {SLOWER_BY:.0%}; default: MegaScale's.",
        "0 <= share < 1",
    )  # fmt: skip

    @property
    def reliability(self) -> Reliability:
        """The rates a second."""
        return Reliability(
            self.failures_per_gpu_hour / 3600,
            self.restart_seconds,
            1e9 * self.saved_gb_per_second,
            self.slow_nodes,
        )
