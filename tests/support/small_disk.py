"""A disk of a few kilobytes, where the machine lets a test mount one, and files that cannot grow."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Inside, the empty folder is a file system of that size; the test is skipped where that is not allowed."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)]
    try:
        refused = sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode != 0
    except OSError:
        refused = True
    if refused:
        pytest.skip("this machine lets no test mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Inside, no file grows beyond a size: a real refusal by the system, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
