"""What is here, and how a case is timed: seconds on the device, its peak of memory, compilations, the matmul rate."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "deepspeed", "peft", "datasets", "flash_attn", "trl", "pytest")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def described() -> dict[str, str]:
    """Return what stands at the head of every table."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "Python": platform.python_version(),
        "host": f"{os.cpu_count()} cores, {memory / 2**30:.0f} GiB",
        "packages": ", ".join(f"{name} {version(name) or 'not there'}" for name in PACKAGES),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found["GPU"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        found["GPU"] = "none"
    return found


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def wait() -> None:
    """Until the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_seconds(call: Callable[[], Any], repeats: int = 5, warm_up: int = 2) -> float:
    """Return the median seconds of `call`, by CUDA's events where there is a GPU."""
    for _ in range(warm_up):
        call()
    return statistics.median(_seconds_of(call) for _ in range(repeats))


def _seconds_of(call: Callable[[], Any]) -> float:
    wait()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def with_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return what `call` returns, and the most bytes that torch held on the GPU meanwhile (0 without one)."""
    if not torch.cuda.is_available():
        return call(), 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated()


def compilations() -> int:
    """How many graphs torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def matmul_rate(dtype: torch.dtype) -> float:
    """Return FLOPs a second of square matrix products, as the programs' train/mfu measures them."""
    from training.utils.engine.ranks.devices import measured_matmul_rate

    return measured_matmul_rate(dtype, device())


def leave_room(room_bytes: int) -> None:
    """Let this process take no more than that from now on: of the GPU's memory, or without one of the address space."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + room_bytes) / total))
        return
    import resource

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["VmSize"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + room_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def gib(amount: float) -> float:
    return amount / 2**30
