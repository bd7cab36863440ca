"""Signals that ask a run to stop: recorded, for the loop to act on after its step. Knows nothing of checkpoints."""

from __future__ import annotations

import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupts:
    """A context manager: inside, SIGTERM, SIGINT and SIGUSR1 set `reason`. A second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        if number == signal.SIGINT:
            # The system's default action: it also ends a process that waits in a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def seconds_since_start() -> float:
    """How long this process has run."""
    import psutil

    return time.time() - psutil.Process().create_time()
