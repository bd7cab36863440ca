"""The flags of checkpoints and interrupts, the same in every step. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from training.utils.flags.flags import AUTO, UNIT, flag
from training.utils.plugins.registry import added

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
    "sequences per optimizer step": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "prompts per rollout": ("per_device_generation_batch_size", "generation_batches"),
    "sequences per minibatch": ("per_device_training_batch_size", "gradient_accumulation_steps"),
}
DEALT_TO_GROUPS = ("sequences per optimizer step",)  # not to ranks, where these share rows


@dataclass
class CheckpointArguments:
    """Saving and resuming. A step is an optimizer step or, in step 3, a rollout with its updates."""

    topic: ClassVar[str] = "checkpoints"
    may_change: ClassVar[bool] = True

    save_every: int = flag(0, "Steps between checkpoints; 0 saves only when the run is interrupted.", "steps >= 0")
    save_epochs: float = flag(
        0.0, "Also write a checkpoint every time this many epochs are complete; 0 disables it.", "epochs >= 0"
    )
    save_at_end: bool = flag(
        False, "Also write a checkpoint after the last step, so that the run can be extended later."
    )
    keep_last: int = flag(
        2, "Checkpoints to keep; 0 keeps all. With 2, one remains if the newest is damaged.", "checkpoints >= 0"
    )
    resume: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": LATEST,
            UNIT: "checkpoint",
            "help": (
                "Resume from the run's latest checkpoint (no value, or true) or from the given path in "
                "OUTPUT_DIR/checkpoints. A run without checkpoints starts from the beginning."
            ),
        },
    )
    overwrite: bool = flag(
        False,
        "Replace the finished run in --output_dir and remove its checkpoints; without this flag, such a folder is "
        "refused. With --resume, this applies only if there is no checkpoint.",
    )

    def __post_init__(self) -> None:
        if self.resume is not None:
            self.resume = _RESUME_WORDS.get(self.resume.lower(), self.resume)
