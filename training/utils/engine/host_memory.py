"""How this process's C library keeps freed memory."""

from __future__ import annotations

import ctypes

# mallopt's parameters and their largest value, an int (glibc 2.36, malloc.h).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MOST = 2**31 - 1
# Fragments of one step's blocks add up where shapes vary. Given back every so many steps, the pages are zeroed again at
# most once in as many: 0.3 s a gigabyte.
_GIVE_BACK_EVERY = 10
_GROWTH = 2**28  # bytes that the heap grows by; without it aligned blocks wander to new pages. Resident once touched


def keep_freed_memory() -> bool:
    """Let freed blocks stay with the process for the next step; return whether the C library took it.

    Training frees and asks for the same large blocks in every step. glibc gives blocks over 32 MB back to the
    system at once (mallopt(3), M_MMAP_THRESHOLD), and the system zeroes every page of the next one: two thirds of an
    optimizer step's time at 25 million float32 weights (docs/lab_book.md). Other C libraries have no mallopt:
    nothing is changed there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    chosen = {_M_MMAP_THRESHOLD: _MOST, _M_TRIM_THRESHOLD: _MOST, _M_TOP_PAD: _GROWTH}
    return all(bool(mallopt(parameter, value)) for parameter, value in chosen.items())


def give_back_freed_memory(step: int) -> None:
    """Every tenth step: return the pages that hold nothing to the system, so that what a process keeps does not grow
    with the variety of its shapes (malloc_trim(3); other C libraries have none)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and step % _GIVE_BACK_EVERY == 0:
        trim(0)
