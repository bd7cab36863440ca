"""Freed memory stays with the process."""

from __future__ import annotations

import sys

import pytest

from tests.support.forked_programs import run_python

SCRIPT = """
import resource, sys, torch
from training.utils.engine.ranks.devices import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("the C library has no mallopt")
for _ in range(20):  # the first blocks are new: each is aligned anew until one fits into what was freed
    torch.ones(16 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(16 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def numbers_of(*words):
    """What a process of its own, which has imported torch, prints."""
    done = run_python(["-c", *words])
    if "no mallopt" in done.stderr:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def test_the_same_large_block_is_not_zeroed_again():
    # 64 MiB are 16,384 pages of 4 KiB: ten fresh blocks touch 163,840 of them (fewer with huge pages).
    (kept,), (left,) = numbers_of(SCRIPT, "keep"), numbers_of(SCRIPT, "leave")
    assert kept < left / 5


HOLES = """
import sys, torch
from training.utils.engine.ranks.devices import give_back_freed_memory, keep_freed_memory
if not keep_freed_memory():
    sys.exit("the C library has no mallopt")
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
blocks = [torch.ones(2**18) for _ in range(200)]  # 1 MiB each
blocks = blocks[::20]  # what stays keeps the holes between from the end of the heap
kept = resident()
give_back_freed_memory(9)
ninth = resident()
give_back_freed_memory(10)
print(kept, ninth, resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_every_tenth_step_gives_the_holes_back():
    kept, ninth, tenth = numbers_of(HOLES)
    assert abs(ninth - kept) < 2**22  # 4 MiB
    assert kept - tenth > 150 * 2**20  # of the 190 MiB that were freed
