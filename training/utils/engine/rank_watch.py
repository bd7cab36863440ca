"""Leaving a run that fails, on every rank: nobody waits for a collective that will not come.

Destroying a process group waits for the collectives that are still pending, in NCCL and in gloo, up to --rank_timeout;
and a rank whose host waits for its GPU in a collective hears of nothing. So a rank that fails says so in the process
group's store, and leaves its group within seconds or without having left it; each rank has a thread that looks into the
store, and ends the process where the main thread does not.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch.distributed as dist

from training.utils.run.program import LEAVING_THREAD, end_without_waiting

_FAILED = "threestep_failed_rank"
_POLL_SECONDS = 2.0
_GRACE_SECONDS = 20.0  # for a rank to end by itself, once another has failed: gloo tells it, an error is its own too
_LEAVE_SECONDS = 5.0


class RankWatch:
    """Looks for another rank's failure until `stop`; with one rank, nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._stopped = threading.Event()
        self._store: Any = None
        if world_size > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()  # a connection of its own: a call of the main thread may block
            threading.Thread(target=self._watch, name="watching other ranks", daemon=True).start()

    def tell(self) -> None:
        """Say that this rank failed, to the others."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store's host may have gone first
                self._store.set(_FAILED, str(self._rank))

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            failed = self._failed_rank()
            if failed is None:
                continue
            if self._stopped.wait(_GRACE_SECONDS):
                return
            end_without_waiting(
                f"rank {self._rank} ends, as {failed} failed while this one waited for it; with checkpoints, --resume "
                "continues from the last one"
            )

    def _failed_rank(self) -> str | None:
        try:
            return f"rank {self._store.get(_FAILED).decode()}" if self._store.check([_FAILED]) else None
        except RuntimeError:  # torch's DistError: the store has ended with its host
            return "the first rank or its launcher"


def leave_process_group(failed: bool) -> None:
    """Destroy the process group, if there is one. failed: abort NCCL's communicators first, and wait for seconds at
    most; what is left ends with the process (`run_program`)."""
    if not dist.is_initialized():
        return
    if not failed or dist.get_world_size() == 1:
        dist.destroy_process_group()
        return
    leaving = threading.Thread(target=_abort_and_destroy, name=LEAVING_THREAD, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_SECONDS)


def _abort_and_destroy() -> None:
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # the run's own error is the one to read
        if "nccl" in dist.get_backend():
            dist.distributed_c10d._abort_process_group()  # destroys them as well (torch 2.13)
        else:
            dist.destroy_process_group()
