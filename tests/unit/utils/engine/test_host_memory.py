"""Freed memory stays with the process."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from training.utils.engine.host_memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("the C library has no mallopt")
for _ in range(20):  # the first blocks are new: each is aligned anew until one fits into what was freed
    torch.ones(16 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(16 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode):
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True)
    if "no mallopt" in done.stderr:
        pytest.skip("this C library has no mallopt")
    return int(done.stdout)


def test_the_same_large_block_is_not_zeroed_again():
    # 64 MiB are 16,384 pages of 4 KiB: ten fresh blocks touch 163,840 of them (fewer with huge pages).
    assert page_faults("keep") < page_faults("leave") / 5
