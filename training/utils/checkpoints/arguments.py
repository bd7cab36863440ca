"""The flags of checkpoints and interrupts, the same in every step. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import AUTO, UNIT, flag
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

LATEST = "latest"
# What YAML, Python and other bare flags write for it being on or off.
_RESUME_WORDS = {"true": LATEST, "yes": LATEST, "false": None, "no": None}
# Where a checkpoint is written and loaded. These may differ too; its files are then converted.
PLACEMENT = frozenset({"ranks", "zero_stage", "actor_zero_stage", "critic_zero_stage", "offload"})
# A resumed run that is given this value of a flag keeps what the run began with.
KEPT_AS_BEGUN = {
    **{"prompt_style": AUTO, "data_split": AUTO, "head_chunk_mb": 0},
    **dict.fromkeys(("reuse_forwards", "reuse_values", "share_beginnings")),
}
KEPT_AS_BEGUN |= added("kept_as_begun", KEPT_AS_BEGUN)
# Of these, what decides memory, speed and rounding alone: chosen again where it cannot be kept.
CHOSEN_AGAIN = KEPT_AS_BEGUN.keys() - {"prompt_style", "data_split"}
SHARING_ROWS = tuple(added("row_sharing", ()))  # so many ranks take the rows of one
# Totals over all ranks, which must stay the same: name -> the flags whose product, times the ranks, gives it.
PER_STEP = {
    "sequences of an optimizer step": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "prompts of a rollout": ("per_device_generation_batch_size", "generation_batches"),
    "sequences of a minibatch": ("per_device_training_batch_size", "gradient_accumulation_steps"),
}
DEALT_TO_GROUPS = ("sequences of an optimizer step",)  # not to ranks, where these share rows
MOST_WAIT_SECONDS = 12 * 3600.0  # other ranks wait a day for the first one
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass
class CheckpointArguments:
    """Saving and resuming. Steps are optimizer steps; in step 3, rollouts with their updates."""

    topic: ClassVar[str] = "checkpoints"
    may_change: ClassVar[bool] = True

    save_every: int = flag(0, "Steps between checkpoints; 0: only when the run is interrupted.", "steps >= 0")
    save_epochs: float = flag(
        0.0, "Also write a checkpoint whenever this many epochs are complete; 0: not by epochs.", "epochs >= 0"
    )
    save_at_end: bool = flag(
        False, "Also write a checkpoint after the last step, so that the run can be extended later."
    )
    keep_last: int = flag(
        2, "Checkpoints to keep; 0 keeps all. With two, one is left if the newest is damaged.", "checkpoints >= 0"
    )
    resume: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": LATEST,
            UNIT: "checkpoint",
            "help": "Resume from the run's latest checkpoint (also: true), or from the named one. A run without "
            "checkpoints starts from the beginning; a named one is a path in OUTPUT_DIR/checkpoints.",
        },
    )
    overwrite: bool = flag(
        False,
        "Replace the finished run in --output_dir, and remove its checkpoints; without it such a folder is refused. "
        "With --resume only where there is no checkpoint.",
    )
    stop_before: str | None = flag(
        None,
        "Write a checkpoint and stop before the program has run this long, for example before a job's time limit:"
        " seconds, or 90m, 1h30m, 2d.",
        "duration",
    )
    stop_at: str | None = flag(
        None,
        "Write a checkpoint and stop before a reservation ends, with room for the longest step so far and a "
        "checkpoint: auto (what the scheduler set in the environment), a variable's name, a file that holds the "
        "time, or the time (seconds since 1970, or 2026-05-01T17:30:00+02:00).",
        "when",
    )

    wait_for_disk_seconds: float = flag(
        600.0,
        "How long a finished run waits for a disk that refuses its model, and tries again; then the model goes to "
        "--rescue_dir. Ctrl-C and SIGTERM end the wait.",
        f"0 <= seconds < {MOST_WAIT_SECONDS:g}",
    )
    rescue_dir: str | None = flag(
        None,
        "Folder for the model of a finished run, and for the checkpoint of one that is asked to stop, if OUTPUT_DIR "
        "takes neither; default: the system's folder for temporary files (TMPDIR, else /tmp).",
        "folder",
    )

    def __post_init__(self) -> None:
        if self.resume is not None:
            self.resume = _RESUME_WORDS.get(self.resume.lower(), self.resume)

    def validate(self, mistakes: Mistakes) -> None:
        """Collect mistakes in these settings."""
        if self.rescue_dir is not None:
            place = self.rescue_dir
            mistakes.require(
                os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK),
                f"--rescue_dir expects a folder that can be written to, got {place}; make it, or name another",
            )
        if self.stop_before is not None:
            mistakes.require(
                seconds_of(self.stop_before) is not None,
                f"--stop_before expects a duration such as 5400, 90m or 1h30m, got '{self.stop_before}'",
            )
        mistakes.require(self.stop_at != "", "--stop_at expects auto, a variable, a file or a time, got nothing")

    def limit_seconds(self) -> float | None:
        return None if self.stop_before is None else seconds_of(self.stop_before)


def seconds_of(duration: str) -> float | None:
    """Seconds in "5400", "90m", "1h30m", "2d"; None if it is not a duration."""
    if re.fullmatch(r"\d+(\.\d+)?", duration):
        return float(duration)
    if not re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", duration) or not duration:
        return None
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"(\d+)([dhms])", duration))
