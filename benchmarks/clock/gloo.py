"""Gloo's bandwidth between two processes of this machine."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing

from threestep.plugins.plan.clock.traffic import SHARE_WITHIN

_MEGABYTES, _TRIES = 16, 9


def gloo_gb_per_second() -> float:
    """Gigabytes a second and direction, as a device's links have them: of the fastest of a few sums of 16 MB."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_sum, (folder,), nprocs=2)
        seconds = float((Path(folder) / "seconds").read_text())
    return _MEGABYTES * 2**20 / seconds / 1e9 / SHARE_WITHIN  # two ranks send each byte once


def _sum(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    numbers, found = torch.ones(_MEGABYTES * 2**18), []
    for _ in range(_TRIES):
        torch.distributed.barrier()
        begun = time.perf_counter()
        torch.distributed.all_reduce(numbers)
        found.append(time.perf_counter() - begun)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(min(found)))
    torch.distributed.destroy_process_group()
