"""Threads of one process in the place of ranks."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class ThreadRanks:
    """`gathered` takes the place of the collective of that name, among the threads of `run`."""

    def __init__(self, count: int) -> None:
        self.count, self._own = count, threading.local()
        self._barrier, self._items = threading.Barrier(count, timeout=30), [b""] * count

    def gathered(self, item: Any) -> list[Any]:
        self._items[self._own.rank] = pickle.dumps(item)
        self._barrier.wait()
        found = [pickle.loads(each) for each in self._items]
        self._barrier.wait()
        return found

    def run(self, act: Callable[[int], Any]) -> list[Any]:
        """Return what `act` returns on each rank."""

        def one(rank: int) -> Any:
            self._own.rank = rank
            return act(rank)

        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(one, range(self.count)))
