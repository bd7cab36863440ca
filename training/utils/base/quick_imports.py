"""Imports of large packages, without looks for garbage among what they make. Cheap to import."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage inside, where large packages are imported.

    In a program that had imported none of them before, what is in memory then is never looked through again: neither by
    a later collection nor by the one at the end, which takes 0.7 s. Both together are a third of a small run.
    """
    collects = gc.isenabled()
    is_program = "torch" not in sys.modules or gc.get_freeze_count() > 0  # not a notebook's own objects
    gc.disable()
    try:
        yield
    finally:
        if is_program:
            gc.freeze()
        if collects:
            gc.enable()
