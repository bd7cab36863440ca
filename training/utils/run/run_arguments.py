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

    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Resolve every setting, build the models without weights, say the plan and the memory that a rank "
            "needs, and end: nothing is loaded, trained or written."
        },
    )
    num_ranks: int | None = field(
        default=None,
        metadata={"help": "--dry_run: for how many ranks; default: the launcher's, or one.", "aliases": ["--ranks"]},
    )

    def traces(self) -> Traces:
        return Traces(frozenset(self.profile_steps), Path(self.output_dir) / FOLDER)

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(self.seed >= 0, f"--seed expects a number from 0 up, got {self.seed}")
        mistakes.require(
            self.num_ranks is None or self.num_ranks >= 1,
            f"--num_ranks expects a whole number from 1 up, got {self.num_ranks}",
        )
        mistakes.require(
            self.num_ranks is None or self.dry_run,
            f"--num_ranks {self.num_ranks} is for --dry_run alone: how many ranks a run has its launcher says "
            "(THREESTEP_RANKS with scripts/*.sh); leave it out",
        )
        for step in self.profile_steps:
            mistakes.require(step >= 1, f"--profile_steps expects numbers of steps from 1 up, got {step}")
