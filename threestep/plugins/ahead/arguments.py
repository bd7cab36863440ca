"""Flags of rollouts that are drawn ahead. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

FREE = "free"  # of --rollouts_ahead
DEFAULT_ROLLOUT_AGE = 2


@dataclass
class AheadArguments:
    """The weights that draw the rollouts of a step."""

    topic: ClassVar[str] = "rollout"

    rollouts_ahead: str = flag(
        "0",
        "Generate responses this many steps ahead, while earlier steps train: each step then learns from responses "
        "generated with weights exactly this many steps older, and its losses are corrected for that "
        "(--mismatch_correction). 0 generates with the newest weights. free: learn from prompts as their responses "
        "finish, in an order that depends on timing and is recorded.",
        "steps",
    )
    max_rollout_age: int | None = flag(
        None,
        "With --rollouts_ahead free: the maximum age, in steps, of the weights that generated the responses a step "
        "learns from; a step waits for responses that would be too old for the next one. Default: "
        f"{DEFAULT_ROLLOUT_AGE}.",
        "steps >= 1",
    )
    replay_schedule: str | None = flag(
        None,
        "With --rollouts_ahead free: the rollouts.jsonl of an earlier run. This run repeats the order recorded "
        "there, and so reproduces that run bit for bit.",
        "file",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        given = self.rollouts_ahead
        mistakes.require(
            self.takes_as_they_end or str(given).isdecimal(),
            f"--rollouts_ahead expects a number of steps, 0 or more, or {FREE}, got '{given}'",
        )
        for name in ("max_rollout_age", "replay_schedule"):
            mistakes.require(
                self.takes_as_they_end or getattr(self, name) is None,
                f"--{name} {getattr(self, name)} needs --rollouts_ahead {FREE}, but --rollouts_ahead is {given}; set "
                f"--rollouts_ahead {FREE}, or remove --{name}",
            )

    @property
    def takes_as_they_end(self) -> bool:
        """--rollouts_ahead is free."""
        return self.rollouts_ahead == FREE

    @property
    def steps_ahead(self) -> int:
        """Steps that weights are old which draw, or may be; 0 where the newest draw."""
        if self.takes_as_they_end:
            return DEFAULT_ROLLOUT_AGE if self.max_rollout_age is None else self.max_rollout_age
        return int(self.rollouts_ahead) if str(self.rollouts_ahead).isdecimal() else 0
