"""Start and end of a DeepSpeed process: ranks, device, process group. A single process needs no launcher.

Nobody waits for a collective that will not come. Destroying a process group waits for the collectives that are still
pending, in NCCL and in gloo, up to --rank_timeout; and a rank whose host waits for its GPU in a collective learns of
nothing. So a rank that fails notes it in the process group's store, and leaves its group within seconds or ends without
leaving it; each rank has a thread that watches the store, and ends the process if the main thread does not.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from training.utils.base.errors import ThreestepError
from training.utils.base.machine import free_port
from training.utils.engine.ranks.collectives import barrier, wait_for_main
from training.utils.engine.ranks.devices import (
    Backend,
    bound_kept_products,
    device_of,
    keep_freed_memory,
    set_allocator,
    set_threads,
    take_accelerator,
)
from training.utils.models.row_sharing import ALONE, RowSharing, row_sharing
from training.utils.run.program import LEAVING_THREAD, end_without_waiting, quick_imports
from training.utils.run.run_arguments import RANK_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from training.utils.flags.added import AddedFlags

QUIETED_LOGGERS = ("DeepSpeed", "deepspeed", "torch.distributed", "transformers.trainer_utils")
_FAILED = "threestep_failed_rank"
_WATCHES = "threestep_watches_of_rank_"
_POLL_SECONDS = 2.0
_GRACE_SECONDS = 20.0  # for a rank to end by itself, once another has failed: gloo reports it, and it has its own error
_LEAVE_SECONDS = 5.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks, and the device it computes on.

    leaving: releases engines when the process leaves the group, so that another run may follow in this process
    timeout_seconds: of a collective
    sharing: the ranks that share rows with this one; rows are dealt to groups
    backend: holds while the loop trains
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    leaving: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, compare=False, repr=False)
    timeout_seconds: float = RANK_TIMEOUT_SECONDS
    sharing: RowSharing = ALONE
    backend: Backend = Backend()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def groups(self) -> int:
        """Among how many rows are dealt: one for each rank, unless ranks share rows."""
        return self.world_size // self.sharing.size

    @property
    def group(self) -> int:
        """The number of this rank's group."""
        return self.rank // self.sharing.size

    @property
    def leads(self) -> bool:
        """True for one rank of each group: the others compute the same figures."""
        return self.sharing.place == 0


def sharing_rows(ranks: Ranks, flags: AddedFlags) -> Ranks:
    """Return the ranks in the groups that share rows, as flags ask. A collective."""
    return replace(ranks, sharing=row_sharing(flags).joined(ranks.rank, ranks.world_size, ranks.timeout_seconds))


@contextlib.contextmanager
def started_process_group(timeout_seconds: float = RANK_TIMEOUT_SECONDS, shares_gpu: bool = False) -> Iterator[Ranks]:
    """Join the launcher's process group, or make one of a single process; leave it at the end.

    timeout_seconds: how long a rank waits for the others in a collective (but see `wait_for_main`).
    shares_gpu: see `devices.set_allocator`.

    With a group that is not destroyed, a finished run may exit with an error (`terminate called without an active
    exception`, seen with gloo on two ranks).
    """
    take_accelerator(os.environ)  # before transformers imports DeepSpeed
    _quiet_libraries()
    set_allocator(os.environ, shares_gpu)
    set_threads(os.environ, int(os.environ.get("WORLD_SIZE", "1")))
    bound_kept_products(os.environ)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_of(local_rank, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    alone: dict[str, str] = {}
    if "WORLD_SIZE" not in os.environ:
        # deepspeed.init_distributed looks for mpi4py where these are missing (deepspeed 0.19, comm/comm.py).
        alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        os.environ.update(alone)
    deepspeed = _imported_deepspeed()
    from deepspeed.accelerator import get_accelerator

    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = get_accelerator().communication_backend_name()
    if alone:  # torch's store would listen on every address of this machine
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    # DeepSpeed makes the groups that reduce gradients with torch's default timeout (deepspeed 0.19, utils/groups.py):
    # 30 minutes for gloo, 10 for NCCL.
    deepspeed.comm.comm.cdb.new_group = partial(dist.new_group, timeout=timeout)
    if device.type == "cpu":
        keep_freed_memory()
    ranks = Ranks(
        int(os.environ["RANK"]), local_rank, int(os.environ["WORLD_SIZE"]), device, timeout_seconds=timeout_seconds
    )
    watch = started_watch(ranks.rank, ranks.world_size)
    failed = True
    try:
        yield ranks
        wait_for_main()  # rank 0 may still be writing the model
        barrier()  # a rank that leaves while another works may abort at its end (gloo, one run in ten)
        failed = False
    finally:
        if failed:
            watch.report_failure()
        if not failed or ranks.world_size == 1:
            ranks.leaving.close()
        leave_process_group(failed)
        watch.stop()
        for name in alone:
            os.environ.pop(name, None)


def _imported_deepspeed() -> Any:
    """DeepSpeed, which logs errors alone and compiles nothing."""
    with quick_imports():
        import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # after the import, which sets it to WARNING
    # On a CPU deepspeed compiles a shared-memory collective at start-up; only inference_all_reduce uses it
    # (deepspeed 0.19, comm/torch.py), which training never calls, and without a compiler it would end the run.
    # The rest of this table nobody reads, and to make it tries a compiler out.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed


def check_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype for "fp32", "bf16" or "fp16"; ThreestepError if this machine cannot train in it."""
    if dtype == "fp16" and not torch.cuda.is_available():
        raise ThreestepError("--dtype fp16 needs a GPU: DeepSpeed does not support it on a CPU; use bf16 or fp32")
    return DTYPES[dtype]


def _quiet_libraries() -> None:
    """Silence the libraries below errors (DeepSpeed, transformers), and a known warning."""
    for name in QUIETED_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # deepspeed 0.19 uses names of collectives that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


class RankWatch:
    """Looks for another rank's failure from `start` until `stop`.

    store: shared by all ranks; None with one rank, which has nobody to look for. Each rank counts how often it has made
        one: a process that runs several programs, one after the other, may keep its store.
    """

    def __init__(self, rank: int, store: Any) -> None:
        self._rank = rank
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watching other ranks", daemon=True)
        self._store = store
        self._key = "" if store is None else f"{_FAILED}_{store.add(f'{_WATCHES}{rank}', 1)}"

    def start(self) -> None:
        if self._store is not None:
            self._thread.start()

    def report_failure(self) -> None:
        """Report this rank's failure to the others."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store's host may have gone first
                self._store.set(self._key, str(self._rank))

    def stop(self) -> None:
        """Wait for the thread to end: one that comes back from the store after the interpreter has ended aborts the
        process (`terminate called without an active exception`)."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_LEAVE_SECONDS)

    def failed_rank(self) -> str | None:
        """The rank that has failed, in words; None if none has."""
        try:
            return f"rank {self._store.get(self._key).decode()}" if self._store.check([self._key]) else None
        except RuntimeError:  # torch's DistError: the store has ended with its host
            return "the first rank or its launcher"

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            failed = self.failed_rank()
            if failed is None:
                continue
            if self._stopped.wait(_GRACE_SECONDS):
                return
            end_without_waiting(
                f"rank {self._rank} ends because it was waiting for {failed}, which failed; with checkpoints, "
                "--resume continues from the last one"
            )


def started_watch(rank: int, world_size: int) -> RankWatch:
    """Return the watch of this rank, at work, in the store of the default process group."""
    store: Any = dist.distributed_c10d._get_default_store() if world_size > 1 else None
    watch = RankWatch(rank, None if store is None else store.clone())  # a separate connection: calls may block
    watch.start()
    return watch


def leave_process_group(failed: bool) -> None:
    """Destroy the process group, if there is one. failed: abort NCCL's communicators first, and wait for seconds at
    most; the rest ends with the process (`run_program`)."""
    if not dist.is_initialized():
        return
    if not failed or dist.get_world_size() == 1:
        _destroy()
        return
    leaving = threading.Thread(target=_abort_and_destroy, name=LEAVING_THREAD, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_SECONDS)


def _destroy() -> None:
    """Destroy the group by DeepSpeed, which then forgets the groups that it made: torch alone would leave them to the
    next run of this process, which cannot use them (deepspeed 0.19, utils/groups.py)."""
    import deepspeed

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def _abort_and_destroy() -> None:
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # the run's error is the one to read
        if "nccl" in dist.get_backend():
            dist.distributed_c10d._abort_process_group()  # destroys them as well (torch 2.13)
        else:
            dist.destroy_process_group()
