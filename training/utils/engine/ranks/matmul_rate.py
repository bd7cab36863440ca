"""The measured matmul rate of this device: the peak that a step's speed is compared with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from training.utils.engine.ranks.collectives import barrier, summed_numbers

if TYPE_CHECKING:
    from training.utils.engine.ranks.startup import Ranks

# Large enough for full speed; on a shared CPU, small ones sometimes run undisturbed.
_SIZES = {"cpu": (512, 1024), "cuda": (8192,)}
_WARM_UP = 3


def peak_of_all_ranks(dtype: torch.dtype, ranks: Ranks) -> float:
    """Return the sum of the ranks' matmul rates in FLOPs per second. A collective: ranks on one CPU share it, so all
    measure at the same time."""
    barrier()
    with ranks.backends.held():
        rate = measured_matmul_rate(dtype, ranks.device)
    return summed_numbers({"rate": rate}, ranks.device)["rate"]


def measured_matmul_rate(dtype: torch.dtype, device: torch.device, seconds: float = 0.15) -> float:
    """Return this process's matmul rate in FLOPs per second: the best of the square matmuls that fit into `seconds`,
    after a warm-up, with torch's threads. The random state does not change.

    Other programs on the device lower the rate, and so raise the share of it that training reaches (MFU).
    """
    sizes = _SIZES.get(device.type, _SIZES["cpu"])
    return max(2.0 * size**3 / _best_seconds(size, dtype, device, seconds / len(sizes)) for size in sizes)


def _best_seconds(size: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    generator = torch.Generator(device).manual_seed(0)  # not zeros: a GPU draws less power for them
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    # As a linear layer multiplies by its weight. A CPU without instructions for bfloat16 (AVX2) makes 0.75 GFLOP/s of
    # the plain product of two matrices, and 26 of this one (torch 2.13, 1,024).
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize

    def timed() -> float:
        wait(device)
        started = time.perf_counter()
        torch.mm(left, right.t())
        wait(device)
        return time.perf_counter() - started

    for _ in range(_WARM_UP):
        timed()
    spent = best = timed()
    while spent < seconds:
        taken = timed()
        spent, best = spent + taken, min(best, taken)
    return best
