"""The flags by which a run records its steps, and what these cannot go with. Cheap to import: `--help` loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.engine.config.arguments import ADAMW
from training.utils.flags.flags import flag
from training.utils.plugins.plugin import StepNeeds

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class RecordingArguments:
    """Records of steps, digests of all."""

    topic: ClassVar[str] = "run"
    may_change: ClassVar[bool] = True

    record_steps: list[int] = flag(
        [],
        "Write a record of these steps (in step 3, of these rollouts) to OUTPUT_DIR/records, for `threestep audit`.",
        "steps >= 1",
    )
    digests: bool | None = flag(
        None,
        "Write sums and hashes of every step to OUTPUT_DIR/digests.jsonl, which `threestep audit RUN_A RUN_B` reads "
        "to find the first step that differs. Default: true on a CPU, false on a GPU, where it makes each step wait "
        "for the device.",
    )
    record_values: bool = flag(
        False,
        "With --record_steps, for models up to 20 million weights: also record gradients, weights and Adam's "
        "moments, so that log-probabilities, gradients and the update are checked too.",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Collect mistakes in these settings."""
        mistakes.require(
            bool(self.record_steps) or not self.record_values,
            "--record_values needs --record_steps, but no steps are given; add --record_steps, or remove "
            "--record_values",
        )


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note rows that a record cannot hold (`Hooks.check`)."""
    check_rows(flags, mistakes, "--record_steps", bool(flags.added.of(RecordingArguments).record_steps))


def step_needs(flags: Any) -> StepNeeds:
    """The needs of recorded steps (`Hooks.step_needs`)."""
    return needs_of("--record_steps", bool(flags.added.of(RecordingArguments).record_steps))


def check_rows(flags: Any, mistakes: Mistakes, name: str, asks: bool) -> None:
    """Note rows and optimizers that a record cannot hold. name: of a flag that records steps, and asks: for some."""
    mistakes.require(
        not (asks and flags.data.form is not None),
        f"{name} needs each sequence to be one contiguous run of tokens, but --parallel_thinking lays out paths side "
        "by side; remove one of them",
    )
    optimizer = flags.settings["optimizer"] if asks else ADAMW
    mistakes.require(
        optimizer == ADAMW,
        f"{name} records and checks AdamW's steps, but --optimizer is {optimizer}; remove one of them",
    )


def needs_of(name: str, asks: bool) -> StepNeeds:
    """The needs of a flag that records steps. name, asks: as of `check_rows`."""
    return StepNeeds({name: asks}, "steps are recorded (--record_steps, --explain_steps)" if asks else "")
