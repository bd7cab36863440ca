"""The flags of reservations. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass
class ReservationArguments:
    """Stops before a time is up."""

    topic: ClassVar[str] = "checkpoints"
    may_change: ClassVar[bool] = True

    stop_before: str | None = flag(
        None,
        "Write a checkpoint and stop before the program has run for this long, for example before a job's time "
        "limit; in seconds, or as a duration such as 90m, 1h30m or 2d.",
        "duration",
    )
    stop_at: str | None = flag(
        None,
        "Write a checkpoint and stop before a reservation ends, leaving time for the longest step so far and for "
        "the checkpoint: auto (use what the scheduler set in the environment), the name of a variable, a file "
        "that holds the time, or the time itself (seconds since 1970, or 2026-05-01T17:30:00+02:00).",
        "when",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Collect mistakes in these settings."""
        if self.stop_before is not None:
            mistakes.require(
                seconds_of(self.stop_before) is not None,
                f"--stop_before expects a duration such as 5400, 90m or 1h30m, got '{self.stop_before}'",
            )
        mistakes.require(self.stop_at != "", "--stop_at expects auto, a variable, a file or a time, but it is empty")


def seconds_of(duration: str) -> float | None:
    """Seconds in "5400", "90m", "1h30m", "2d"; None if it is not a duration."""
    if re.fullmatch(r"\d+(\.\d+)?", duration):
        return float(duration)
    if not re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", duration) or not duration:
        return None
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"(\d+)([dhms])", duration))
