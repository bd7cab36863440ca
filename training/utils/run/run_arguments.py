"""The settings every program has: where a run is kept, and its one seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from training.utils.run.errors import Mistakes
from training.utils.run.traces import FOLDER, Traces


@dataclass
class RunArguments:
    """Where the run is kept and what makes it repeatable."""

    output_dir: str = field(default="runs/last", metadata={"help": "Folder of this run: settings, metrics, model."})
    seed: int = field(
        default=1234,
        metadata={"help": "One seed for the split, the order, dropout and sampling; the same default in all steps."},
    )

    profile_steps: list[int] = field(
        default_factory=list,
        metadata={"help": "Trace these steps (step 3: rollouts) with torch's profiler, to OUTPUT_DIR/profile."},
    )

    def traces(self) -> Traces:
        return Traces(frozenset(self.profile_steps), Path(self.output_dir) / FOLDER)

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(self.seed >= 0, f"--seed expects a number from 0 up, got {self.seed}")
        for step in self.profile_steps:
            mistakes.require(step >= 1, f"--profile_steps expects numbers of steps from 1 up, got {step}")
