"""Several processes that share a list of work: each takes every n-th piece, and the first one gets all results.

They meet in the launcher's store alone, not in a process group: nobody waits in a collective for a slower one, and what
else looks for a process group (a reward model's forwards, a rollout engine) works as in one process.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from training.utils.base.errors import ThreestepError

_FAILED = "failed"
_LONGEST_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Sharers:
    """This process among those that share. store: None for one process."""

    rank: int = 0
    world_size: int = 1
    store: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def pieces(self, count: int) -> range:
        """The pieces of `count` that are this process's."""
        return range(self.rank, count, self.world_size)

    def from_main(self, name: str, work: Callable[[], Any]) -> Any:
        """Call `work` on the first rank, and return its result, a JSON value, on every rank. name: as in `results`."""
        if not self.is_main:
            return self._received(name)
        result = work()
        if self.store is not None:
            self.store.set(name, json.dumps(result))
        return result

    def results(self, name: str, count: int, work: Callable[[int], Any]) -> list[Any]:
        """Call `work` for this process's pieces, and return the results of all `count` in their order, as JSON values;
        an empty list on other ranks than the first. name: the same on every rank, new for each call."""
        own = {piece: work(piece) for piece in self.pieces(count)}
        if not self.is_main:
            for piece, result in own.items():
                self.store.set(f"{name}/{piece}", json.dumps(result))
            return []
        return [own[piece] if piece in own else self._received(f"{name}/{piece}") for piece in range(count)]

    def _received(self, key: str) -> Any:
        started = time.monotonic()
        while not self.store.check([key]):
            if self.store.check([_FAILED]):
                raise ThreestepError(f"rank {self.store.get(_FAILED).decode()} failed; see its messages above")
            time.sleep(min(0.001 + (time.monotonic() - started) / 10, _LONGEST_POLL_SECONDS))
        return json.loads(self.store.get(key))


ALONE = Sharers()


@contextlib.contextmanager
def sharers() -> Iterator[Sharers]:
    """The processes that a launcher started (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    # Timeouts are of single calls, none of which waits for another rank's work.
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timedelta(minutes=5))))
    together = Sharers(rank, world_size, dist.PrefixStore("threestep_sharing", store))
    try:
        yield together
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the store's host may have gone first
            together.store.set(_FAILED, str(rank))
        raise
    _leave(together)


def _leave(together: Sharers) -> None:
    """Leave the store, which the first rank may host, once every rank has finished."""
    if not together.is_main:
        together.store.set(f"left/{together.rank}", "1")
        return
    for rank in range(1, together.world_size):
        together._received(f"left/{rank}")
