"""Signals that ask a run to stop, for its loop to act on after the step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

from training.utils.run.program import is_lost_rank, outlast_the_launcher

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_NEXT = "finishing this step, then writing a checkpoint"
_SECOND = "; press Ctrl-C again to stop at once, without one"
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
    raise KeyboardInterrupt("stopped at once by a second Ctrl-C, without a checkpoint for this step")
