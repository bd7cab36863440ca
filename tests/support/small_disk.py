"""A disk of a few kilobytes, where the machine lets a test mount one."""

from __future__ import annotations

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
