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
        FAILURES_PER_GPU_HOUR,
            "Failures per GPU-hour, including the GPU's share of failures with other causes; default: Llama 3's "
            "rate.",
        "rate > 0",
    )  # fmt: skip
    restart_seconds: float = flag(
        RESTART_SECONDS,
        "Time from a failure until the checkpoint is loaded again; default: MegaScale's value.",
        "seconds >= 0",
    )
    saved_gb_per_second: float = flag(
        SAVED_GB_PER_SECOND,
        "Checkpoint write speed per GPU (1e9 bytes per second); default: that of Llama 3's storage.",
        "gigabytes > 0",
    )
    slow_nodes: float = flag(
        SLOW_NODES, f"Fraction of slow nodes, which are {SLOWER_BY:.0%} slower; default: MegaScale's value.",
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
