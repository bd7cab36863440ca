"""The end of a run's time: so long after its start (`--stop_before`), or with the machine's reservation (`--stop_at`),
which is read anew after every step, since a scheduler may prolong it."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from threestep.plugins.reservations.arguments import seconds_of
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import either
from training.utils.contracts.run import RunCourse
from training.utils.flags.flags import AUTO

# Variables in which schedulers tell when a job ends, in seconds since 1970: Slurm, Volcengine's ML platform, SageMaker.
VARIABLES = (
    "SLURM_JOB_END_TIME",
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
# Seconds since 1970 of the years 2001 to 5138: milliseconds, and durations, lie outside.
_FIRST, _LAST = 1e9, 1e11


def check_end(settings: Mapping[str, Any]) -> None:
    """ThreestepError where --stop_at is given and no time can be read."""
    if settings.get("stop_at") is not None:
        end_of(settings["stop_at"])


def open_course(settings: Mapping[str, Any]) -> RunCourse | None:
    """Return what stops a run in time; None where no flag asks for it."""
    asks = settings["stop_before"] is not None or settings["stop_at"] is not None
    return TimedCourse(settings["stop_before"], settings["stop_at"]) if asks else None


class TimedCourse(RunCourse):
    """Stops a run while there is room for one more step and a checkpoint, each as long as the longest so far; the first
    checkpoint is a guess, another step."""

    def __init__(self, stop_before: str | None, stop_at: str | None) -> None:
        self._stop_before, self._stop_at = stop_before, stop_at
        self._limit_seconds = None if stop_before is None else seconds_of(stop_before)
        self._deadline = None if stop_at is None else Deadline(stop_at)
        self._began = time.monotonic()  # the step
        self._longest_seconds = 0.0
        self._save_seconds: float | None = None

    def resumed(self, state: Mapping[str, Any]) -> None:
        self._began = time.monotonic()

    def stop_reason(self) -> str | None:
        now = time.monotonic()
        self._longest_seconds = max(self._longest_seconds, now - self._began)
        self._began = now
        save_seconds = self._longest_seconds if self._save_seconds is None else self._save_seconds
        needed = 1.5 * (self._longest_seconds + save_seconds)
        if self._limit_seconds is not None and seconds_since_start() + needed > self._limit_seconds:
            return f"--stop_before {self._stop_before}"
        left = None if self._deadline is None else self._deadline.seconds_left()
        return f"--stop_at {self._stop_at}" if left is not None and left < needed else None

    def saved(self, step: int) -> None:
        now = time.monotonic()
        self._save_seconds, self._began = now - self._began, now


class Deadline:
    """The end of a reservation during a run: once it has passed, it stops nothing more, unless it is moved. given: the
    value of --stop_at"""

    def __init__(self, given: str) -> None:
        self._given = given
        self._end: float | None = None
        self._is_unread = self._has_passed = False

    def seconds_left(self) -> float | None:
        """Return how long the reservation lasts; None after its end. If it can no longer be read, the last value
        stays, with a warning."""
        try:
            self._end, self._is_unread = end_of(self._given), False
        except ThreestepError as problem:
            if not self._is_unread:
                log(f"warning: {problem}; the last value read still applies")
            self._is_unread = True
        if self._end is None:
            return None
        left = self._end - time.time()
        if left <= 0 and not self._has_passed:
            log(f"warning: --stop_at: the end time passed {-left:.0f} seconds ago; the run continues without it")
        self._has_passed = left <= 0
        return None if self._has_passed else left


def end_of(given: str, environment: Mapping[str, str] = os.environ) -> float:
    """Return the end that `--stop_at` names, in seconds since 1970: `auto`, a variable of the environment, a time, or
    else a file that holds one. ThreestepError where nothing can be read."""
    moment = moment_of(given)
    if moment is not None:
        return moment
    if given == AUTO:
        variable = next((name for name in VARIABLES if name in environment), None)
        if variable is None:
            raise ThreestepError(
                f"--stop_at {AUTO} expects a scheduler to set {either(VARIABLES)} in the environment, but none is "
                "set; pass a variable, a file or a time instead, or remove --stop_at"
            )
        given = variable
    if re.fullmatch(r"[A-Z][A-Z0-9_]*", given):
        place, text = f"the variable {given}", environment.get(given)
        if text is None:
            raise ThreestepError(f"--stop_at reads {place}, which is not set; set it, or leave --stop_at out")
    else:
        place = f"the file {given}"
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = getattr(problem, "strerror", None) or "it is not text"
            raise ThreestepError(
                f"--stop_at reads {place}, which cannot be read ({reason}); write the time into it, or leave "
                "--stop_at out"
            ) from None
    moment = moment_of(text.strip())
    if moment is None:
        raise ThreestepError(
            f"--stop_at expects seconds since 1970 or a time such as 2026-05-01T17:30:00+02:00 in {place}, got "
            f"'{text.strip()[:100]}'"
        )
    return moment


def moment_of(text: str) -> float | None:
    """Return seconds since 1970 of "1777649400" or of an ISO 8601 time, in this machine's time zone where it names
    none; None for anything else: milliseconds, durations, words."""
    try:
        if re.fullmatch(r"\d+(\.\d+)?", text):
            moment = float(text)
        else:  # Python 3.10 knows no Z
            moment = datetime.fromisoformat(re.sub(r"Z$", "+00:00", text)).timestamp()
    except (ValueError, OverflowError):
        return None
    return moment if _FIRST <= moment <= _LAST else None


def seconds_since_start() -> float:
    """Age of this process, by a clock that nobody sets."""
    return time.monotonic() - _began(os.getpid())


@functools.cache
def _began(process: int) -> float:
    """When `process`, this one, began, by the monotonic clock."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process(process).create_time())
