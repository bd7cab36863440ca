"""The settings of every run: its folder, its seed, profiling and dry runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.utils.run.errors import Mistakes
from training.utils.run.flags import flag
from training.utils.run.traces import FOLDER, Traces


@dataclass
class RunArguments:
    """The run's folder and seed."""

    output_dir: str = flag("runs/last", "The run's folder: settings, metrics, model.")
    seed: int = flag(
        1234, "Seed of the split, the order, dropout and sampling; the same default in all steps.", least=0
    )
    profile_steps: list[int] = flag(
        [], "Trace these steps (step 3: rollouts) with torch's profiler, to OUTPUT_DIR/profile.", least=1
    )
    dry_run: bool = flag(
        False,
        "Resolve every setting, build the models without weights, print the plan and the memory of a rank, "
        "and end. Nothing is loaded, trained or written.",
    )
    num_ranks: int | None = flag(
        None, "--dry_run: ranks to plan for; default: the launcher's, or one.", aliases=["--ranks"], least=1
    )

    def traces(self) -> Traces:
        return Traces(frozenset(self.profile_steps), Path(self.output_dir) / FOLDER)

    def validate(self, mistakes: Mistakes) -> None:
        """Collect mistakes in these settings."""
        mistakes.require(
            self.num_ranks is None or self.dry_run,
            f"--num_ranks expects --dry_run, got {self.num_ranks} without it; a run's launcher sets its ranks "
            "(THREESTEP_RANKS with scripts/*.sh)",
        )
