"""The flags of checkpoints and interrupts, the same in every step. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from training.utils.run.errors import Mistakes

LATEST = "latest"
# Settings that a resumed run may have otherwise: none of them decides what an optimizer step does, but for the two that
# say how long the run is, which move the learning rate's schedule on purpose.
MAY_CHANGE = frozenset(
    {
        "output_dir", "save_every", "save_at_end", "keep_last", "resume", "stop_before", "max_train_steps",
        "num_train_epochs", "eval_interval", "profile_steps", "per_device_eval_batch_size", "report_mfu",
        "data_output_path", "num_workers", "rebuild_cache", "max_bad_steps", "rank_timeout",
        "report", "report_to", "vllm_memory_share", "vllm_cache_gib", "vllm_sleep", "vllm_check_weights",
    }
)  # fmt: skip
# Where a checkpoint was written, and is taken up: these may change too, and its files are converted then.
PLACEMENT = frozenset({"ranks", "zero_stage", "actor_zero_stage", "critic_zero_stage", "offload"})
# What a step takes over all ranks stays, however it is divided: name -> the flags whose product with the ranks it is.
PER_STEP = {
    "sequences of an optimizer step": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "prompts of a rollout": ("per_device_generation_batch_size", "generation_batches"),
    "sequences of a minibatch": ("per_device_training_batch_size", "gradient_accumulation_steps"),
}
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass
class CheckpointArguments:
    """Checkpoints, and going on from them. Steps are optimizer steps; in step 3, rollouts with their updates."""

    save_every: int = field(
        default=0, metadata={"help": "Write a checkpoint every so many steps; 0: only where the run is interrupted."}
    )
    save_at_end: bool = field(
        default=False, metadata={"help": "Write one after the last step too, so that a longer run can go on from it."}
    )
    keep_last: int = field(
        default=2,
        metadata={
            "help": "Keep so many checkpoints; 0 keeps all. Two: where the newest turns out damaged, one is left."
        },
    )
    resume: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": LATEST,
            "help": "Go on from OUTPUT_DIR's latest checkpoint (from the beginning where it has none yet), or from the "
            "one at this path in OUTPUT_DIR/checkpoints.",
        },
    )
    stop_before: str | None = field(
        default=None,
        metadata={
            "help": "Write a checkpoint and end before the program has run this long, for a machine that ends at a "
            "known time: seconds, or 90m, 1h30m, 2d."
        },
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        for flag in ("save_every", "keep_last"):
            got = getattr(self, flag)
            mistakes.require(got >= 0, f"--{flag} expects 0 or more, got {got}")
        if self.stop_before is not None:
            mistakes.require(
                seconds_of(self.stop_before) is not None,
                f"--stop_before expects a duration such as 5400, 90m or 1h30m, got '{self.stop_before}'",
            )

    def limit_seconds(self) -> float | None:
        return None if self.stop_before is None else seconds_of(self.stop_before)


def seconds_of(duration: str) -> float | None:
    """Seconds in "5400", "90m", "1h30m", "2d"; None where it is no duration."""
    if re.fullmatch(r"\d+(\.\d+)?", duration):
        return float(duration)
    if not re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", duration) or not duration:
        return None
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"(\d+)([dhms])", duration))
