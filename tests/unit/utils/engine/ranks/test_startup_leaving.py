"""One rank's failure as the others see it. The processes that it ends: tests/distributed/test_leaving.py."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist

from training.utils.engine.ranks import startup
from training.utils.engine.ranks.startup import RankWatch


def test_a_failure_is_seen_by_all_and_only_in_its_own_program():
    store = dist.HashStore()
    first = [RankWatch(rank, store) for rank in (0, 1)]
    assert first[0].failed_rank() is None
    first[1].report_failure()
    assert first[0].failed_rank() == "rank 1"
    assert RankWatch(0, store).failed_rank() is None  # the next program of the same processes


def test_one_rank_tells_nobody():
    watch = RankWatch(0, None)
    watch.start()
    watch.report_failure()
    watch.stop()


class SlowStore:
    """Of a busy machine: each look takes a while."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def add(self, key: str, by: int) -> int:
        return by

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        time.sleep(0.3)
        return False


def test_it_has_ended_once_it_is_stopped(monkeypatch):
    """A thread that is still in the store when the interpreter ends aborts the process."""
    monkeypatch.setattr(startup, "_POLL_SECONDS", 0.01)
    store: Any = SlowStore()
    watch = RankWatch(0, store)
    watch.start()
    assert store.asked.wait(10)
    watch.stop()
    assert "watching other ranks" not in {thread.name for thread in threading.enumerate()}
