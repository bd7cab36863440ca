"""The device of a rank, and its settings before a process starts: allocator, threads, determinism."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from training.utils.base.errors import ThreestepError
from training.utils.run.launch import cores

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


def chosen_accelerator(environment: Mapping[str, str], has_cuda: bool) -> str:
    """Return "cuda" or "cpu": DS_ACCELERATOR, or by default torch's choice. ThreestepError for another name, for a
    missing GPU, and for a GPU that torch uses despite "cpu"."""
    wanted = environment.get(ACCELERATOR, "").strip()
    if wanted not in ("", "cpu", "cuda"):
        raise ThreestepError(
            f"{ACCELERATOR} expects cpu or cuda, got '{wanted}': Threestep trains on no other; unset it"
        )
    if wanted == "cuda" and not has_cuda:
        visible = f"{VISIBLE}={environment[VISIBLE]}" if VISIBLE in environment else f"{VISIBLE} is not set"
        raise ThreestepError(
            f"{ACCELERATOR}=cuda asks for a GPU, and torch {torch.__version__} finds none here ({visible}): unset "
            f"{ACCELERATOR} for the CPU, or install a driver and a build of torch that fit the GPU"
        )
    if wanted == "cpu" and has_cuda:
        raise ThreestepError(
            f"{ACCELERATOR}=cpu, and CUDA has started in this process: set {VISIBLE}= (empty) beside it"
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
            f"rank {local_rank} of this host (LOCAL_RANK, from 0) needs a GPU of its own, and {visible} "
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
    here = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world_size
    return _available_bytes() // max(1, int(here))


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def set_threads(environment: Mapping[str, str], world_size: int) -> None:
    """Share the cores out among the ranks of this host, unless OMP_NUM_THREADS is set."""
    if world_size > 1 and not environment.get(_THREADS):
        here = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world_size)
        torch.set_num_threads(max(1, cores() // here))


def bound_kept_products(environment: MutableMapping[str, str]) -> None:
    """Have this process keep the prepared products of few shapes, unless the user says how many. Before the first
    product on a CPU: rows are of ever new lengths, and 60 MB were kept for each of them (docs/lab_book.md)."""
    for name in _KEPT_PRODUCTS:
        environment.setdefault(name, _MOST_KEPT)


def make_deterministic(device: torch.device, environment: MutableMapping[str, str]) -> None:
    """Have CUDA compute the same bits from the same numbers; an operation that cannot raises a RuntimeError. Call it
    before the first matrix product. A CPU needs nothing of it."""
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
