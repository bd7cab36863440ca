"""Flags of rollouts in a folder. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class RecordedArguments:
    """Rollouts that are written, or read."""

    topic: ClassVar[str] = "rollout"

    rollout_dump: str | None = flag(None, "Write every rollout to this folder, for --rollout_replay.", "folder")
    rollout_replay: str | None = flag(
        None, "Instead of generating, read the rollouts that --rollout_dump wrote to this folder.", "folder"
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            self.rollout_dump is None or self.rollout_replay is None,
            "--rollout_dump and --rollout_replay cannot be combined, because a replay generates nothing new; "
            "leave one of them out",
        )
        if self.rollout_replay is not None:
            mistakes.require(
                bool(list(Path(self.rollout_replay).glob("rollout_*"))),
                f"--rollout_replay expects a folder that --rollout_dump filled, but {self.rollout_replay} has no "
                "rollouts; choose another",
            )
