"""The settings every program has: where a run is kept, and its one seed."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.utils.run.errors import Mistakes


@dataclass
class RunArguments:
    """Where the run is kept and what makes it repeatable."""

    output_dir: str = field(default="runs/last", metadata={"help": "Folder of this run: settings, metrics, model."})
    seed: int = field(
        default=1234,
        metadata={"help": "One seed for the split, the order, dropout and sampling; the same default in all steps."},
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(self.seed >= 0, f"--seed expects a number from 0 up, got {self.seed}")
