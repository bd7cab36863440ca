"""Leaving a run that fails, on every rank: nobody waits for a collective that will not come.

Destroying a process group waits for the collectives that are still pending, in NCCL and in gloo, up to --rank_timeout;
and a rank whose host waits for its GPU in a collective learns of nothing. So a rank that fails notes it in the process
group's store, and leaves its group within seconds or ends without leaving it; each rank has a thread that watches the
store, and ends the process if the main thread does not.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch.distributed as dist

from training.utils.run.program import LEAVING_THREAD, end_without_waiting

_FAILED = "threestep_failed_rank"
_WATCHES = "threestep_watches_of_rank_"
_POLL_SECONDS = 2.0
_GRACE_SECONDS = 20.0  # for a rank to end by itself, once another has failed: gloo reports it, and it has its own error
_LEAVE_SECONDS = 5.0


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
                f"rank {self._rank} ends, as {failed} failed while this one waited for it; with checkpoints, --resume "
                "continues from the last one"
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
