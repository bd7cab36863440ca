"""A disk that refuses: EIO or ENOSPC at any call of the C library that changes what lies below some folders.

A library that is loaded before all others (LD_PRELOAD) counts these calls. The process that is started with it forks
runs; in each fork `refuse` says which call fails.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("disk.c")
_FOR_EVER = 2**62


@dataclass(frozen=True)
class Refusal:
    """Call `first` (from 1) below the folders fails with `number`, of errno; with `stays`, all after it do too. 0: none
    fails, they are counted alone."""

    first: int
    number: int
    stays: bool = False

    def __str__(self) -> str:
        return f"{os.strerror(self.number)} {'from' if self.stays else 'at'} call {self.first}"


def why_not() -> str | None:
    """What is missing for it; None if nothing is."""
    if not sys.platform.startswith("linux"):
        return "a disk that refuses is made for Linux alone"
    return None if shutil.which("gcc") else "a disk that refuses is compiled by gcc, and this machine has none"


def built_library() -> Path:
    """The shared library, compiled where it was not yet."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"threestep_refusing_disk_{os.getuid()}_{key}.so"
    if not path.exists():
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        words = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(beside), str(SOURCE), "-ldl"]
        subprocess.run(words, check=True)
        os.replace(beside, path)
    return path


def preloaded() -> dict[str, str]:
    return {**os.environ, "LD_PRELOAD": str(built_library())}


def refuse(folders: Sequence[Path], refusal: Refusal, journal: Path) -> None:
    """From now on this process's calls below `folders` are counted, noted in `journal`, and refused as said."""
    last = 0 if not refusal.first else _FOR_EVER if refusal.stays else refusal.first
    library = ctypes.CDLL(None)
    library.threestep_refuse.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_char_p]
    paths = "\n".join(map(str, folders)).encode()
    library.threestep_refuse(paths, refusal.first, last, refusal.number, str(journal).encode())
