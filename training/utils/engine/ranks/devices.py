"""The device of a rank: its settings before a process starts (allocator, threads, determinism), the C library's
treatment of freed memory, settings of PyTorch that hold while a run trains, and the measured rate of its matmuls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from training.utils.base.errors import ThreestepError
from training.utils.base.machine import cores
from training.utils.base.user_files import named_object
from training.utils.engine.ranks.collectives import barrier, summed_numbers
from training.utils.plugins.registry import added, one_at_most

ACCELERATOR, VISIBLE = "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"
# Which torch reads before it allocates (torch 2.13, CUDAAllocatorConfig.h), in its order; the last is its present name.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_THREADS = "OMP_NUM_THREADS"
# How many prepared products oneDNN, and PyTorch before it, keep for shapes that they have met, 1,024 by default (oneDNN
# 3.12, primitive_cache.cpp; ideep, lru_cache.hpp). Each holds room of its factors' size.
_KEPT_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MOST_KEPT = "16"  # those of a layer, forward and backward
# mallopt's parameters and their largest value, an int (glibc 2.36, malloc.h).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MOST = 2**31 - 1
# Where shapes vary, fragments of each step's blocks add up. Returned to the system every N steps, a page is zeroed
# again at most once in N steps: 0.3 s per gigabyte.
_GIVE_BACK_EVERY = 10
_GROWTH = 2**28  # bytes that the heap grows by; with less, aligned blocks move to new pages. Resident once touched
# Large enough for full speed; on a shared CPU, small ones sometimes run undisturbed.
_SIZES = {"cpu": (512, 1024), "cuda": (8192,)}
_WARM_UP = 3


def chosen_accelerator(environment: Mapping[str, str], has_cuda: bool) -> str:
    """Return "cuda" or "cpu": DS_ACCELERATOR, or torch's choice. ThreestepError if torch does not use that device."""
    wanted = environment.get(ACCELERATOR, "").strip()
    if wanted not in ("", "cpu", "cuda"):
        raise ThreestepError(
            f"{ACCELERATOR} expects cpu or cuda, got '{wanted}': Threestep supports no other; unset it"
        )
    if wanted == "cuda" and not has_cuda:
        visible = f"{VISIBLE}={environment[VISIBLE]}" if VISIBLE in environment else f"{VISIBLE} is not set"
        raise ThreestepError(
            f"{ACCELERATOR}=cuda needs a GPU, but torch {torch.__version__} finds none here ({visible}): unset "
            f"{ACCELERATOR} to use the CPU, or install a driver and a torch build that fit the GPU"
        )
    if wanted == "cpu" and has_cuda:
        raise ThreestepError(
            f"{ACCELERATOR}=cpu, but CUDA has already started in this process: also set {VISIBLE}= (empty)"
        )
    return wanted or ("cuda" if has_cuda else "cpu")


def take_accelerator(environment: MutableMapping[str, str]) -> None:
    """Set DS_ACCELERATOR in `environment`, this process's, before DeepSpeed reads it; "cpu" hides GPUs from torch."""
    if environment.get(ACCELERATOR) == "cpu":
        environment[VISIBLE] = ""
    environment[ACCELERATOR] = chosen_accelerator(environment, torch.cuda.is_available())


def device_of(local_rank: int, visible: int) -> torch.device:
    """Return cuda:LOCAL_RANK of `visible` GPUs, or the CPU without any; ThreestepError if there are more ranks."""
    if visible == 0:
        return torch.device("cpu")
    if local_rank >= visible:
        raise ThreestepError(
            f"rank {local_rank} of this host (LOCAL_RANK, from 0) needs a GPU of its own, but {visible} "
            f"{'are' if visible > 1 else 'is'} visible ({VISIBLE}={os.environ.get(VISIBLE, 'not set')}): start at most "
            f"{visible} rank{'s' if visible > 1 else ''} here, or let every rank see all GPUs"
        )
    return torch.device("cuda", local_rank)


def set_allocator(environment: MutableMapping[str, str], shares_gpu: bool = False) -> None:
    """Have CUDA's allocator grow its segments, unless the user set the allocator: blocks of varying sizes leave less
    memory unused between them. Before CUDA allocates.

    shares_gpu: a rollout engine sleeps on this GPU, whose memory pool refuses such segments.
    """
    if not shares_gpu and not any(environment.get(name) for name in _ALLOCATOR):
        environment[_ALLOCATOR[-1]] = _EXPANDABLE


def free_bytes(device: torch.device, world_size: int, environment: Mapping[str, str]) -> int:
    """Return the memory that is free for this rank: of its GPU, or its share of the host's, of which each of the ranks
    here gets the same (Linux's MemAvailable; all of the host's memory where the system does not say)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _available_bytes() // ranks_here(environment, world_size)


def ranks_here(environment: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this host: what the launcher set in the environment, or all `world_size`."""
    return max(1, int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world_size))


def host_share(world_size: int) -> int:
    """Return the bytes of this host's memory, free or not, for each of the ranks on it."""
    return _host_bytes() // ranks_here(os.environ, world_size)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return _host_bytes()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def set_threads(environment: Mapping[str, str], world_size: int) -> None:
    """Share the cores out among the ranks of this host, unless OMP_NUM_THREADS is set."""
    if world_size > 1 and not environment.get(_THREADS):
        torch.set_num_threads(max(1, cores() // ranks_here(environment, world_size)))


def bound_kept_products(environment: MutableMapping[str, str]) -> None:
    """Have this process keep the prepared products of few shapes, unless the user says how many. Before the first
    product on a CPU: rows are of ever new lengths, and 60 MB were kept for each of them (docs/lab_book.md)."""
    for name in _KEPT_PRODUCTS:
        environment.setdefault(name, _MOST_KEPT)


def make_deterministic(device: torch.device, environment: MutableMapping[str, str]) -> None:
    """Make CUDA deterministic; other operations raise a RuntimeError. Call it before the first matrix product."""
    if device.type != "cuda":
        return
    environment.setdefault(_CUBLAS, ":4096:8")  # the CUDA toolkit's documentation, cuBLAS: results reproducibility
    torch.use_deterministic_algorithms(True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # for finding bugs; it costs a pass over each tensor
    torch.backends.cudnn.benchmark = False


def device_sentence(device: torch.device, world_size: int, deterministic: bool, environment: Mapping[str, str]) -> str:
    """Return a line for the log: ranks, device, threads, and on CUDA the allocator."""
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    threads = torch.get_num_threads()
    origin = f"{_THREADS}" if environment.get(_THREADS) else f"of {cores()} cores"
    each = " each" if world_size > 1 else ""
    line = f"{ranks} on {device.type}, {threads} thread{'s' if threads > 1 else ''}{each} ({origin})"
    if device.type == "cuda":
        given = next((environment[name] for name in _ALLOCATOR if environment.get(name)), "torch's own")
        line += f", {torch.cuda.get_device_name(device)}; allocator: {given}"
        return f"{line}; deterministic" if deterministic else line
    return f"{line}; --deterministic changes nothing on a CPU" if deterministic else line


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


class Backend(NamedTuple):
    """PyTorch's settings while a run trains, such as which library multiplies, from a plugin.

    held: opens what holds in this process, in all its threads.
    decided: settings that the flags left open, by the flags' names.
    words: on the device, for the log; "" for none.
    """

    held: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    decided: Mapping[str, Any] = {}
    words: str = ""


def backend_of(
    settings: Mapping[str, Any], device: torch.device, began_with: Callable[[str], Any] | None = None
) -> Backend:
    """Return what a plugin sets (`backends` of `Plugin.tables`). A collective.

    settings: by the flags' names. began_with: the setting of the run that is resumed, by its name; None where none is
    """
    place = one_at_most(added("backends", ()).items(), "only one plugin can set PyTorch up", "each do so")
    return Backend() if place is None else named_object(place)(settings, device, began_with)


def peak_of_all_ranks(dtype: torch.dtype, device: torch.device) -> float:
    """Return the sum of the ranks' matmul rates in FLOP/s. A collective: ranks on one CPU measure at the same time."""
    barrier()
    return summed_numbers({"rate": measured_matmul_rate(dtype, device)}, device)["rate"]


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
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize

    def timed() -> float:
        wait(device)
        started = time.perf_counter()
        # As a linear layer multiplies by its weight. A CPU without instructions for bfloat16 (AVX2) makes 0.75 GFLOP/s
        # of the plain product of two matrices, and 26 of this one (torch 2.13, 1,024).
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
