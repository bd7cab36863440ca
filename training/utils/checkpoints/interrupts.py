"""Stops from outside, for the loop to act on after its step: signals, and the end of a machine's reservation
(`--stop_at`), which is read anew after every step, since a scheduler may prolong it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.base.tables import either
from training.utils.flags.flags import AUTO
from training.utils.run.program import is_lost_rank, outlast_the_launcher

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_NEXT = "finishing this step, then writing a checkpoint"
_SECOND = "; Ctrl-C again stops at once, without one"
# One Ctrl-C may arrive twice: from the terminal and from the launcher, or from `timeout`, which signals its child and
# then its whole group.
_SAME_SECONDS = 1.0


class Interrupts:
    """A context manager: inside, SIGTERM, SIGINT and SIGUSR1 set `reason` and print a line. A second SIGINT ends the
    run at once; one that comes within a second of the first is the same.

    announces: whether this rank prints the line
    follows: the end of the line: what the run does now
    alone: whether there are no other ranks. The second SIGINT is then a KeyboardInterrupt, which a notebook survives;
        a rank is ended by the system, even where it waits for others in a collective.

    Off the main thread Python handles no signals, and nothing is noted. Where another rank is lost, SIGTERM stays
    ignored (`outlast_the_launcher`).
    """

    def __init__(self, announces: bool = True, alone: bool = True, follows: str = _NEXT) -> None:
        self.reason: str | None = None
        self._follows = follows
        self._announces = announces
        self._alone = alone
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: object, problem: BaseException | None, *trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if problem is not None and is_lost_rank(problem):
            outlast_the_launcher()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.reason is None:
            self.reason = signal.Signals(number).name
            if self._announces:
                _announce(self.reason, self._follows)
        if number == signal.SIGINT:
            # The program stands still meanwhile: afterwards the system itself must be able to end it, in a collective.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(_SAME_SECONDS)
            signal.signal(signal.SIGINT, _end_at_once if self._alone else signal.SIG_DFL)


def _announce(reason: str, follows: str) -> None:
    line = f"{reason}: {follows}{_SECOND if reason == 'SIGINT' else ''}"
    with contextlib.suppress(OSError):  # print() fails where the signal interrupts another print()
        os.write(2, f"\n{line}\n".encode())


def _end_at_once(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt("stopped at once by a second Ctrl-C, without a checkpoint of this step")


def seconds_since_start() -> float:
    """Age of this process, by a clock that nobody sets."""
    return time.monotonic() - _began(os.getpid())


@functools.cache
def _began(process: int) -> float:
    """When `process`, this one, began, by the monotonic clock."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process(process).create_time())


# Variables in which schedulers tell when a job ends, in seconds since 1970: Slurm, Volcengine's ML platform, SageMaker.
VARIABLES = (
    "SLURM_JOB_END_TIME",
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
# Seconds since 1970 of the years 2001 to 5138: milliseconds, and durations, lie outside.
_FIRST, _LAST = 1e9, 1e11


@dataclass(frozen=True)
class Expiry:
    """The value of `--stop_at`. Exactly one of the three is set.

    moment: seconds since 1970. variable: of the environment. file: holds a moment as the flag takes it.
    """

    moment: float | None = None
    variable: str | None = None
    file: Path | None = None

    def read(self, environment: Mapping[str, str] = os.environ) -> float:
        """Return the end in seconds since 1970; ThreestepError where nothing can be read."""
        if self.moment is not None:
            return self.moment
        if self.variable is not None:
            text, place = environment.get(self.variable), f"the variable {self.variable}"
            if text is None:
                raise ThreestepError(f"--stop_at reads {place}, which is not set; set it, or leave --stop_at out")
        else:
            assert self.file is not None
            place = f"the file {self.file}"
            try:
                text = self.file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as problem:
                reason = getattr(problem, "strerror", None) or "it is no text"
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


def expiry_of(given: str, environment: Mapping[str, str] = os.environ) -> Expiry:
    """Return the expiry that `--stop_at` names: `auto`, a variable of the environment, a time, or else a file.

    Raises ThreestepError for `auto` where no scheduler's variable is set.
    """
    if given == AUTO:
        variable = next((name for name in VARIABLES if name in environment), None)
        if variable is None:
            raise ThreestepError(
                f"--stop_at {AUTO} expects a scheduler's {either(VARIABLES)} in the environment, got none of them; "
                "give the variable, file or time that tells the end, or leave --stop_at out"
            )
        return Expiry(variable=variable)
    moment = moment_of(given)
    if moment is not None:
        return Expiry(moment=moment)
    if re.fullmatch(r"[A-Z][A-Z0-9_]*", given):
        return Expiry(variable=given)
    return Expiry(file=Path(given))


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


class Deadline:
    """The end of a reservation during a run: once it has passed, it stops nothing more, unless it is moved."""

    def __init__(self, expiry: Expiry) -> None:
        self._expiry, self._end = expiry, expiry.read()
        self._is_unread = self._has_passed = False

    def seconds_left(self) -> float | None:
        """Return how long the reservation lasts; None after its end. If it can no longer be read, the last value
        stays, with a warning."""
        try:
            self._end, self._is_unread = self._expiry.read(), False
        except ThreestepError as problem:
            if not self._is_unread:
                log(f"warning: {problem}; what was read last holds")
            self._is_unread = True
        left = self._end - time.time()
        if left <= 0 and not self._has_passed:
            log(f"warning: --stop_at: the end has passed {-left:.0f} seconds ago, and the run goes on without it")
        self._has_passed = left <= 0
        return None if self._has_passed else left
