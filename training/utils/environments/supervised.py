"""The supervisor of a model's Python program: starts it within limits, and ends it with all that it started.

Serves `python_tool`, which runs this file's source in a separate process, where nothing of this package can be
imported. As the first process of a PID namespace its end is the end of everything in it. Elsewhere it adopts the
processes that its descendants leave behind (prctl's PR_SET_CHILD_SUBREAPER), and ends all descendants that it sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable

# Its exit codes besides 0; from SIGNALLED on, the number of the signal that ended the program.
TOO_MANY_PROCESSES, TOO_MUCH_MEMORY, TOO_MUCH_DISK, TOO_SLOW, SIGNALLED = 100, 101, 102, 103, 128
_SET_DEATH_SIGNAL, _DROP_FROM_BOUNDING_SET, _SET_SUBREAPER, _NO_NEW_PRIVILEGES = 1, 24, 36, 38  # linux/prctl.h
_CAPABILITIES = 41  # as of Linux 5.9; one that does not exist is an error that changes nothing
_LOOK_SECONDS = 0.005
_LOOKING_SHARE = 0.2  # of the time, at most, is spent on looking at processes


def main(words: list[str]) -> None:
    """Run the program that standard input holds, as main.py in the current folder. words: seconds; bytes of memory
    and of a file; open files; processes; files of the disk that the folder is (0: it has no disk)."""
    seconds = float(words[0])
    memory, file_bytes, open_files, processes, disk_files = map(int, words[1:])
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    with open("main.py", "wb") as file:
        file.write(sys.stdin.buffer.read())
    limits = {"CPU": int(seconds) + 1, "AS": memory, "FSIZE": file_bytes, "NOFILE": open_files, "CORE": 0}
    pid = os.fork()
    if pid == 0:
        _become_program(prctl, limits)
    code = _watch(pid, time.monotonic() + seconds, memory, processes, disk_files=disk_files)
    if os.getpid() != 1:
        _end_descendants()
    os._exit(code)


def _become_program(prctl: Callable[..., int], limits: dict[str, int]) -> None:
    """Take limits, give up rights, become the program."""
    os.setsid()  # a signal to its group reaches the supervisor no more
    os.nice(10)  # many processes of it leave the supervisor its turn
    prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    for capability in range(_CAPABILITIES):
        prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.execv(sys.executable, [sys.executable, "-I", "-X", "utf8", "main.py"])  # noqa: S606 - no words of anybody


def _watch(pid: int, deadline: float, memory: int, processes: int, *, disk_files: int) -> int:
    """Wait until the program has ended or left its limits; return the supervisor's exit code."""
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while (waited := os.waitpid(-1, os.WNOHANG))[0]:  # adopted ones too
                if waited[0] == pid:
                    status = os.waitstatus_to_exitcode(waited[1])
                    return 0 if status >= 0 else SIGNALLED - status
        began = time.monotonic()
        seen = _descendants()
        if len(seen) > processes:
            return TOO_MANY_PROCESSES
        if sum(map(_private_bytes, seen)) > memory:
            return TOO_MUCH_MEMORY
        if disk_files:
            used = os.statvfs(".")
            if used.f_bavail == 0 or used.f_ffree == 0 or used.f_files - used.f_ffree > disk_files:
                return TOO_MUCH_DISK
        time.sleep(max(_LOOK_SECONDS, (time.monotonic() - began) / _LOOKING_SHARE))
    return TOO_SLOW


def _end_descendants() -> None:
    """Stop all, until no new one appears; then end them."""
    stopped: set[int] = set()
    for _ in range(1000):
        new = set(_descendants()) - stopped
        if not new:
            break
        for pid in new:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in _descendants():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _descendants() -> list[int]:
    """All processes below this one; as the first of a namespace, all others in it."""
    mine = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if mine == 1:
        return [pid for pid in pids if pid != 1]
    children: dict[int, list[int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(pid)
    processes, waiting = [], [mine]
    while waiting:
        below = children.get(waiting.pop(), [])
        processes += below
        waiting += below
    return processes


def _private_bytes(pid: int) -> int:
    """Memory that a process shares with no file; 0 of one that has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * resource.getpagesize()
