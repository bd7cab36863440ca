"""Alarms of users' functions (SIGALRM and the like, by which Math-Verify limits its time), and time limits of calls in
the main thread.

Python installs signal handlers in the main thread alone. In any other, `signal.signal` raises ValueError, which a
function may answer itself: Math-Verify then finds no answer right. So refusals are noted where they happen, whatever
the function makes of them.
"""

from __future__ import annotations

import _signal  # `signal.signal` looks its function up here, also where it was imported by its name
import contextvars
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from training.utils.base.console import note

_ALARMS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
_LIMIT = signal.SIGURG  # ignored by default: one that comes too late does nothing
_STRIKES, _STRIKE_SECONDS = 10, 1.0  # of a limit, before the function is given up
_warned = threading.Event()


class RefusedAlarm(BaseException):
    """Raised to end a call that sets an alarm outside the main thread."""


class TimeIsUp(BaseException):
    """Raised in the main thread to end a call that takes too long."""


class AlarmsNoted:
    """any: whether an alarm was refused. ends_call: a refusal ends the call by RefusedAlarm."""

    def __init__(self, ends_call: bool) -> None:
        self.any, self.ends_call = False, ends_call


_noting: contextvars.ContextVar[AlarmsNoted | None] = contextvars.ContextVar("alarms", default=None)


def in_main_thread() -> bool:
    """True where signal handlers may be set, and run."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def alarms_noted(*, ends_call: bool = False) -> Iterator[AlarmsNoted]:
    """Note the alarms that this thread is refused inside, and those of its coroutines; see `AlarmsNoted`. A thread that
    a function starts itself is warned of, once."""
    _watch()
    noted = AlarmsNoted(ends_call)
    token = _noting.set(noted)
    try:
        yield noted
    finally:
        _noting.reset(token)


@functools.cache
def _watch() -> None:
    """Note refusals from now on."""
    plain = _signal.signal

    @functools.wraps(plain)
    def noting(number: int, handler: Any, /) -> Any:
        if number in _ALARMS and not in_main_thread():
            _note(_noting.get())
        return plain(number, handler)

    _signal.signal = noting  # type: ignore[assignment]


def _note(noted: AlarmsNoted | None) -> None:
    if noted is not None:
        noted.any = True
        if noted.ends_call:
            raise RefusedAlarm
    elif not _warned.is_set():
        _warned.set()
        note(
            "warning: a time limit that uses signals (signal.signal) was refused in the thread "
            f"'{threading.current_thread().name}', which a function started: signals work only in the main thread, and "
            "without them Math-Verify accepts no answer; use processes, or disable the limit"
        )


@contextmanager
def time_limit(seconds: float, give_up: Callable[[], object]) -> Iterator[None]:
    """Inside, in the main thread, TimeIsUp is raised after `seconds`, and each second from then on, for a function may
    catch it; at the end too if it was. After ten, `give_up` is called in another thread: a call outside of Python does
    not return. SIGALRM is the function's inside; at the end it is as before."""
    ended, over, main = threading.Event(), threading.Event(), threading.get_ident()

    def strike(number: int, frame: object) -> None:
        if not ended.is_set():
            raise TimeIsUp

    def watch() -> None:
        for after in (seconds, *[_STRIKE_SECONDS] * _STRIKES):
            if ended.wait(after):
                return
            over.set()
            signal.pthread_kill(main, _LIMIT)
        if not ended.wait(_STRIKE_SECONDS):
            give_up()

    before = signal.signal(_LIMIT, strike)
    threading.Thread(target=watch, name="time limit of a call", daemon=True).start()
    try:
        with _alarm_restored():
            try:
                yield
                if over.is_set():
                    raise TimeIsUp
            finally:
                ended.set()
    finally:  # once more where the last strike came before
        ended.set()
        signal.signal(_LIMIT, before)


@contextmanager
def _alarm_restored() -> Iterator[None]:
    handler, (left, interval) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    begin = time.monotonic()
    try:
        yield
    finally:
        if left:
            left = max(left - (time.monotonic() - begin), 0.001)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if handler is not None:  # None: set by no Python code
            signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left, interval)
