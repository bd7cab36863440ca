"""The peak that a step's speed is compared with: how fast this device multiplies matrices, measured."""

from __future__ import annotations

import time

import torch

from training.utils.engine.collectives import barrier, summed_numbers
from training.utils.engine.startup import Ranks

# Large enough to run at full speed; on a CPU shared with others, small ones now and then run alone.
_SIZES = {"cpu": (512, 1024), "cuda": (8192,)}
_WARM_UP = 3


def peak_of_all_ranks(dtype: torch.dtype, ranks: Ranks) -> float:
    """Return the ranks' matmul rates in FLOPs a second, added up; all measure at once, because ranks on CPUs share
    them. A collective."""
    barrier()
    rate = measured_matmul_rate(dtype, ranks.device)
    return summed_numbers({"rate": rate}, ranks.device)["rate"]


def measured_matmul_rate(dtype: torch.dtype, device: torch.device, seconds: float = 0.15) -> float:
    """Return this process's matmul rate in FLOPs a second: the best of the square matmuls that fit into `seconds`,
    after a warm-up, with the threads that torch has been given. The random state stays as it is.

    What other programs on the device take meanwhile is missing from it, and makes the share of it (MFU) too large.
    """
    sizes = _SIZES.get(device.type, _SIZES["cpu"])
    return max(2.0 * size**3 / _best_seconds(size, dtype, device, seconds / len(sizes)) for size in sizes)


def _best_seconds(size: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    generator = torch.Generator(device).manual_seed(0)  # numbers, not zeros: a GPU draws less power for zeros
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    product = torch.empty_like(left)

    def timed() -> float:
        _wait(device)
        started = time.perf_counter()
        torch.mm(left, right, out=product)
        _wait(device)
        return time.perf_counter() - started

    for _ in range(_WARM_UP):
        timed()
    spent = best = timed()
    while spent < seconds:
        taken = timed()
        spent, best = spent + taken, min(best, taken)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
