"""The C library's treatment of freed memory in this process."""

from __future__ import annotations

import ctypes

# mallopt's parameters and their largest value, an int (glibc 2.36, malloc.h).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MOST = 2**31 - 1
# Where shapes vary, fragments of each step's blocks add up. Returned to the system every N steps, a page is zeroed
# again at most once in N steps: 0.3 s per gigabyte.
_GIVE_BACK_EVERY = 10
_GROWTH = 2**28  # bytes that the heap grows by; with less, aligned blocks move to new pages. Resident once touched


def keep_freed_memory() -> bool:
    """Keep freed blocks in the process for the next step; return whether the C library does so.

    Training frees and allocates the same large blocks in every step. glibc returns blocks over 32 MB to the system at
    once (mallopt(3), M_MMAP_THRESHOLD), which then zeroes every page of the next one: two thirds of an optimizer
    step's time at 25 million float32 weights (docs/lab_book.md). Other C libraries have no mallopt: no change there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    limits = {_M_MMAP_THRESHOLD: _MOST, _M_TRIM_THRESHOLD: _MOST, _M_TOP_PAD: _GROWTH}
    return all(bool(mallopt(parameter, value)) for parameter, value in limits.items())


def give_back_freed_memory(step: int) -> None:
    """Every tenth step, return empty pages to the system, so that memory does not grow with the variety of shapes
    (malloc_trim(3); other C libraries have none)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and step % _GIVE_BACK_EVERY == 0:
        trim(0)
