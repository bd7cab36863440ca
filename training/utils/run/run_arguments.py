"""The settings of every run: its folder, its seed, profiling, and how it handles failures. Cheap to import:
`--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.flags.added import in_place_of_run
from training.utils.flags.flags import flag
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from collections.abc import Mapping

    from training.utils.base.errors import Mistakes

DEFAULT_OUTPUT_DIR = "runs/last"
RANK_TIMEOUT_SECONDS = 1800.0  # torch.distributed's own for gloo; DeepSpeed's 10 minutes are short for a slow disk


@dataclass
class RunArguments:
    """The run's folder and seed."""

    topic: ClassVar[str] = "run"

    output_dir: str = flag(
        DEFAULT_OUTPUT_DIR, "Folder for the run, its checkpoints and its trained model.", "folder", may_change=True
    )
    run_name: str | None = flag(
        None,
        "The run's name in trackers and reports; without --output_dir, its folder is runs/NAME.",
        "name",
        may_change=True,
    )
    seed: int = flag(
        1234, "Seed for the split, the order of rows, dropout and sampling; use the same one in all steps.", "seed >= 0"
    )
    shuffle: bool = flag(
        True,
        "Shuffle the training rows anew for each epoch; false: keep the data's order, one dataset after another.",
        topic="split",
    )
    deterministic: bool = flag(
        False, "On CUDA, use slower operations with bit-identical results (docs/resume.md); not needed on a CPU."
    )
    num_ranks: int | None = flag(
        None,
        "Number of ranks; default: one per visible GPU, or one without GPUs. `threestep` and scripts/*.sh start them."
        + "".join(f" {each.ranks_help}" for each in added("in_place_of_run", ()).values()),
        "ranks >= 1",
        aliases=["--ranks"],
    )

    def __post_init__(self) -> None:
        if self.run_name and self.output_dir == DEFAULT_OUTPUT_DIR and _is_plain(self.run_name):
            self.output_dir = str(Path(DEFAULT_OUTPUT_DIR).parent / self.run_name)

    def validate(self, mistakes: Mistakes) -> None:
        """Collect mistakes in these settings."""
        mistakes.require(
            self.run_name is None or self.output_dir != DEFAULT_OUTPUT_DIR or _is_plain(self.run_name),
            f"--run_name expects a valid folder name, got '{self.run_name}'; choose another, or set --output_dir",
        )

    def validate_beside(self, settings: Mapping[str, Any], mistakes: Mistakes) -> None:
        """Note --num_ranks where nothing reads it. settings: of all groups, by the flags' names."""
        instead = added("in_place_of_run", ())
        also = "".join(f", or that --{name} {each.ranks}" for name, each in instead.items())
        mistakes.require(
            self.num_ranks is None or in_place_of_run(settings) is not None,
            f"--num_ranks {self.num_ranks} is the number of ranks that `threestep` and scripts/*.sh start{also}; use "
            "one of these, or a launcher that sets the ranks",
        )


def _is_plain(name: str) -> bool:
    """True if a folder can have this name."""
    return name.strip() not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


@dataclass
class FaultArguments:
    """Steps with NaN or infinity, and ranks that hang."""

    topic: ClassVar[str] = "run"
    may_change: ClassVar[bool] = True

    max_bad_steps: int = flag(
        10,
        "End the run after this many skipped optimizer steps. A step is skipped if its loss or gradient is not finite "
        "(row ids: OUTPUT_DIR/bad_steps.jsonl). A healthy run in fp32 or bf16 has none; overflows while fp16 finds "
        "its loss scale do not count.",
        "steps >= 1",
    )
    rank_timeout: float = flag(
        RANK_TIMEOUT_SECONDS,
        "How long a rank waits for other ranks before the run ends with an error. This catches ranks that hang; a rank "
        "that dies is noticed at once.",
        "0 < seconds < 1e+08",
    )
