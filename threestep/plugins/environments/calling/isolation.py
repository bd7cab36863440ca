"""Isolation of a model's Python program from the machine: by bubblewrap, by namespaces alone, or hardly any.

The strongest that this machine allows is chosen by running a program in it. Each describes what it guards.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

DISK_BYTES = 64 << 20
DISK_FILES = 4096
_READ = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - private to a program, in memory
# The disks of a program, mounted by the first process of its namespaces before it becomes the supervisor.
_WITH_DISK = (
    'for disk in "$3" /dev/shm; do [ ! -d "$disk" ] || '
    'mount -t tmpfs -o size="$1",nr_inodes="$2",mode=700,nosuid,nodev none "$disk" || exit; done; '
    'cd "$3" && shift 3 && exec "$@"'
)


@dataclass(frozen=True)
class Isolation:
    """command: words that run others in it, for a folder of the program. has_disk: of a size, in memory. sentence: its
    guarantees and their limits."""

    name: str
    command: Callable[[Path], Sequence[str]]
    has_disk: bool
    sentence: str


def _bubblewrap(folder: Path) -> list[str]:
    """New namespaces of every kind, all of Python read-only, nothing else of the machine's files."""
    read = dict.fromkeys([*_READ, sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent)])
    words = [_program("bwrap"), "--unshare-all", *_no_user_namespaces(), "--die-with-parent", "--as-pid-1"]
    words += ["--cap-drop", "ALL"]
    for path in read:
        words += ["--ro-bind-try", path, path]
    disk = ["--size", str(DISK_BYTES), "--tmpfs"]
    words += ["--proc", "/proc", "--dev", "/dev", *disk, _SHARED_MEMORY, "--remount-ro", "/dev", *disk, str(folder)]
    return [*words, "--remount-ro", "/", "--chdir", str(folder), "--"]


@functools.cache
def _no_user_namespaces() -> tuple[str, ...]:
    """Flags that forbid a program namespaces of its own, where bubblewrap (0.8) and the machine can."""
    flags = ("--unshare-user", "--disable-userns")
    try:
        words = [_program("bwrap"), *flags, "--ro-bind", "/", "/", "true"]
        works = subprocess.run(words, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        works = False
    return flags if works else ()


def _namespaces(folder: Path) -> list[str]:
    """New namespaces of processes, mounts and network, and a disk for the folder."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    flags = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--ipc", "--uts"]
    disk = ["sh", "-c", _WITH_DISK, "sh", str(DISK_BYTES), str(DISK_FILES), str(folder)]
    return [_program("unshare"), *user, *flags, "--", *disk]


def _program(name: str) -> str:
    return shutil.which(name) or name


BUBBLEWRAP = Isolation(
    "bubblewrap", _bubblewrap, True,
    "a program sees no files but Python's, no processes but its own and no network; it shares the kernel and the "
    "processor",
)  # fmt: skip
NAMESPACES = Isolation(
    "namespaces", _namespaces, True,
    "a program has no network, sees no processes but its own, and ends with everything it started; but it can read "
    "and write files as the run's user: install bubblewrap",
)  # fmt: skip
PROCESSES = Isolation(
    "processes", lambda folder: (), False,
    "a program ends with everything it started, unless it kills its supervisor first; but it can read and write "
    "files as the run's user, fill the disk, see the run's processes with their environment variables (tokens) and "
    "reach the network: install bubblewrap, or use a container that allows namespaces",
)  # fmt: skip


@functools.cache
def strongest(works: Callable[[Isolation], bool]) -> Isolation:
    """The first that works here. works: runs a program in it."""
    return next((each for each in (BUBBLEWRAP, NAMESPACES) if works(each)), PROCESSES)
