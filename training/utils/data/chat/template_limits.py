"""Bounds on a chat template: its time, its memory and the length of its output.

A template comes with a model, and is a program: Jinja's sandbox keeps it from the machine, and lets it loop for years
or multiply a text to gigabytes. Its first renderings happen in a separate process with limits; later ones, whose rows
may be another matter, are ended if they take too long.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from training.utils.base.errors import ThreestepError

TRIAL_SECONDS = 10  # of the processor, for three short conversations; a real template takes milliseconds
_WAITING = 3  # times as long by the clock, on a machine that others use
MOST_BYTES = 1 << 30  # more than the process has when it begins
MOST_CHARACTERS = 1 << 26  # of one rendering
RENDERING_SECONDS = 60.0  # of any later one, by the clock
_OUT_OF_MEMORY, _TOO_LONG = 3, 4  # exit codes of the trial
_watched_process = 0
_deadlines: dict[int, float] = {}  # of threads that render
_lock = threading.Lock()


class _TooSlow(Exception):
    """Raised in a thread whose rendering takes too long."""


def check_first_renderings(render: Callable[[], None]) -> None:
    """Call `render` in a forked process. ThreestepError if that takes too much time or memory, or writes too much
    (`check_length`). Its other exceptions are not handled here."""
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that another thread holds; the child renders, and takes none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _try_out(render)
    deadline = time.monotonic() + _WAITING * TRIAL_SECONDS
    while (waited := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(waited[1])
    if code == _OUT_OF_MEMORY:
        raise ThreestepError(_refused(f"takes more than {MOST_BYTES >> 20} MiB of memory"))
    if code == _TOO_LONG:
        raise ThreestepError(_refused(f"writes more than {MOST_CHARACTERS:,} characters"))
    if code < 0:
        raise ThreestepError(_refused(f"takes more than {TRIAL_SECONDS} seconds"))


def _try_out(render: Callable[[], None]) -> None:
    """Render within limits and end the process, without anything that a Python program does at its end."""
    code = 1
    try:
        for number in (signal.SIGXCPU, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_SECONDS, TRIAL_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        render()
        code = 0
    except ThreestepError:
        code = _TOO_LONG
    except (MemoryError, OverflowError):
        code = _OUT_OF_MEMORY
    finally:
        os._exit(code)


@contextmanager
def limited_rendering(conversation: str) -> Iterator[None]:
    """Inside, ThreestepError after `RENDERING_SECONDS`. conversation: the rendered one, in words. One step of a
    template that Python cannot interrupt is not ended."""
    thread = threading.get_ident()
    _watch()
    with _lock:
        _deadlines[thread] = time.monotonic() + RENDERING_SECONDS
    try:
        yield
    except _TooSlow:
        raise ThreestepError(
            f"the chat template takes more than {RENDERING_SECONDS:g} seconds for {conversation}; mend its loops, or "
            "give another one with --chat_template"
        ) from None
    finally:
        with _lock:
            if _deadlines.pop(thread, None) is None:  # it came too late, and may still be pending
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def check_length(text: str, conversation: str) -> None:
    """ThreestepError for a rendering that no model reads."""
    if len(text) > MOST_CHARACTERS:
        raise ThreestepError(
            f"the chat template writes {len(text):,} characters for {conversation}, more than {MOST_CHARACTERS:,}; "
            "mend its loops, or give another one with --chat_template"
        )


def _watch() -> None:
    """Start the thread that looks at deadlines, once in each process."""
    global _watched_process
    with _lock:
        if _watched_process == os.getpid():
            return
        _watched_process = os.getpid()
        _deadlines.clear()  # of the process that this one is a fork of
    threading.Thread(target=_end_late_ones, name="deadlines of renderings", daemon=True).start()


def _end_late_ones() -> None:
    while True:
        time.sleep(min(1.0, RENDERING_SECONDS / 4))
        now = time.monotonic()
        with _lock:
            for thread in [thread for thread, deadline in _deadlines.items() if now > deadline]:
                del _deadlines[thread]
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooSlow))


def _refused(what: str) -> str:
    return (
        f"the chat template {what} for three short conversations; it is no template to use: give another one with "
        "--chat_template"
    )
