"""The supervisor of a model's Python program: starts it within limits, and ends it with all that it started.

Serves `python_tool`, which runs this file's source in a separate process, where nothing of this package can be
imported. As the first process of a PID namespace its end is the end of everything in it. Elsewhere it adopts the
processes that its descendants leave behind (prctl's PR_SET_CHILD_SUBREAPER), and ends all descendants that it sees.

The program cannot stop it, look into it or slow it down: it is not dumpable (prctl's PR_SET_DUMPABLE), and the kernel
refuses the program the calls that would (seccomp).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable

# Its exit codes besides 0; from SIGNALLED on, the number of the signal that ended the program.
TOO_MANY_PROCESSES, TOO_MUCH_MEMORY, TOO_MUCH_DISK, TOO_SLOW, SIGNALLED = 100, 101, 102, 103, 128
TOO_MANY_THREADS = 104
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SECCOMP, _DROP_FROM_BOUNDING_SET = 1, 4, 22, 24  # linux/prctl.h
_SET_SUBREAPER, _NO_NEW_PRIVILEGES, _SECCOMP_FILTER = 36, 38, 2
_CAPABILITIES = 41  # as of Linux 5.9; one that does not exist is an error that changes nothing
_DISKS = (".", "/dev/shm")  # noqa: S108 - private to a program
_LOOK_SECONDS = 0.005
_LOOKING_SHARE = 0.2  # of the time, at most, is spent on looking at processes

# Numbers of system calls on x86-64 and on 64-bit Arm, whose names in a seccomp filter are these.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# There are none for the program: of other processes, of new namespaces, and of memory that no process has mapped.
_MISSING_CALLS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "ioprio_set": (251, 30), "perf_event_open": (298, 241),
    "unshare": (272, 97), "setns": (308, 268), "clone3": (435, 435), "bpf": (321, 280), "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}  # fmt: skip
# Those whose first argument, and with setpriority the second, names the process: 0 is the one that calls.
_CALLS_ON_ITSELF = {
    "prlimit64": (302, 261), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "setpriority": (141, 140),
}  # fmt: skip
_CLONE, _NEW_NAMESPACES = (56, 220), 0x7E020000  # and the bits of its first argument that ask for namespaces
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h; the last one with an error number
_NOT_PERMITTED, _NO_SUCH_CALL = _REFUSE | 1, _REFUSE | 38
_OTHER_NUMBERS = 0x40000000  # from there on, those of x86-64 with short pointers


def main(words: list[str]) -> None:
    """Run the program that standard input holds, as main.py in the current folder. words: seconds; bytes of memory
    and of a file; open files; processes; threads of all; files of each disk (0: it has none of its own)."""
    seconds = float(words[0])
    memory, file_bytes, open_files, processes, threads, disk_files = map(int, words[1:])
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    with open("main.py", "wb") as file:
        file.write(sys.stdin.buffer.read())
    limits = {"CPU": int(seconds) + 1, "AS": memory, "FSIZE": file_bytes, "NOFILE": open_files, "CORE": 0}
    pid = os.fork()
    if pid == 0:
        _become_program(prctl, limits)
    code = _watch(pid, time.monotonic() + seconds, memory, processes, threads=threads, disk_files=disk_files)
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
    _take_filter(prctl)
    os.execv(sys.executable, [sys.executable, "-I", "-X", "utf8", "main.py"])  # noqa: S606 - no words of anybody


def _take_filter(prctl: Callable[..., int]) -> None:
    """Give up system calls, for itself and all that it starts."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        return
    code = b"".join(_filter(*_MACHINES[machine]))
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    if prctl(_SET_SECCOMP, _SECCOMP_FILTER, ctypes.create_string_buffer(program, len(program)), 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter")


def _filter(column: int, architecture: int) -> list[bytes]:
    """Return a seccomp filter as classic BPF. A jump names how many instructions it skips."""

    def load(offset: int) -> bytes:  # a word of seccomp_data: 0 number, 4 architecture, from 16 on arguments
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def end(result: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, result)

    def skip(value: int, if_equal: int, otherwise: int) -> bytes:
        return struct.pack("HBBI", 0x15, if_equal, otherwise, value)

    found = [load(4), skip(architecture, 1, 0), end(_KILL), load(0)]
    found += [struct.pack("HBBI", 0x35, 0, 1, _OTHER_NUMBERS), end(_KILL)]  # greater or equal
    for number in _MISSING_CALLS.values():
        found += [skip(number[column], 0, 1), end(_NO_SUCH_CALL)]
    for name, number in _CALLS_ON_ITSELF.items():
        words = (16, 24) if name == "setpriority" else (16,)
        checks = [part for word in words for part in (load(word), skip(0, 1, 0), end(_NOT_PERMITTED))]
        found += [skip(number[column], 0, len(checks) + 1), *checks, end(_ALLOW)]
    bits = struct.pack("HBBI", 0x45, 0, 1, _NEW_NAMESPACES)  # any of them set
    return [*found, skip(_CLONE[column], 0, 3), load(16), bits, end(_NOT_PERMITTED), end(_ALLOW)]


def _watch(pid: int, deadline: float, memory: int, processes: int, *, threads: int, disk_files: int) -> int:
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
        taken = [_taken_by(process) for process in seen]
        if sum(own_bytes for own_bytes, _ in taken) > memory:
            return TOO_MUCH_MEMORY
        if sum(own_threads for _, own_threads in taken) > threads:
            return TOO_MANY_THREADS
        if disk_files and any(_is_full(disk, disk_files) for disk in _DISKS if os.path.isdir(disk)):
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


def _is_full(disk: str, files: int) -> bool:
    used = os.statvfs(disk)
    return used.f_bavail == 0 or used.f_ffree == 0 or used.f_files - used.f_ffree > files


def _taken_by(pid: int) -> tuple[int, int]:
    """Memory of a process that is in no file, with what it shares with others, and its threads; 0 of one that has
    ended."""
    found, threads = 0, 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith((b"RssAnon:", b"RssShmem:")):
                found += int(line.split()[1]) << 10
            elif line.startswith(b"Threads:"):
                threads = int(line.split()[1])
    return found, threads
