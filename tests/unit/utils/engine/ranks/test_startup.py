"""One process needs no launcher, and leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.forked_programs import run_python
from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import DTYPE_NAMES
from training.utils.engine.ranks import startup
from training.utils.engine.ranks.startup import DTYPES, RankWatch, check_dtype

ALONE = """
import os
from training.utils.engine.ranks.startup import started_process_group
from training.utils.engine.ranks.collectives import barrier, gathered, largest, summed, summed_numbers
import psutil
import torch
for _ in range(2):
    with started_process_group() as ranks:
        assert (ranks.rank, ranks.local_rank, ranks.world_size, ranks.is_main) == (0, 0, 1, True)
        assert torch.distributed.is_initialized()
        barrier()
        listens = [each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"]
        assert all(address.startswith("127.") for address in listens), listens
        assert summed_numbers({"a": 2.0}, ranks.device) == {"a": 2.0}
    assert not torch.distributed.is_initialized()
    assert "RANK" not in os.environ and "WORLD_SIZE" not in os.environ
import deepspeed
assert vars(deepspeed.ops)["__compatible_ops__"] == {"deepspeed_shm_comm": False}  # no compiler was tried out
try:
    with started_process_group():
        raise KeyError("x")
except KeyError:
    assert not torch.distributed.is_initialized()
values = torch.ones(2)
total = summed(values)
assert total is not values and torch.equal(total, values)
assert gathered("x") == ["x"] and largest(3, torch.device("cpu")) == 3
"""


def test_a_single_process_needs_no_launcher_and_closes_its_group():
    """DeepSpeed-Chat fails without a launcher, and with one may end with 250 for a group left open."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = run_python(["-c", ALONE], environment)
    assert done.returncode == 0, done.stderr


def test_dtypes():
    assert check_dtype("fp32") is torch.float32 and check_dtype("bf16") is torch.bfloat16
    assert tuple(DTYPES) == DTYPE_NAMES


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can train in fp16")
def test_fp16_needs_a_gpu():
    with pytest.raises(ThreestepError, match="--dtype fp16 needs a GPU.*use bf16 or fp32"):
        check_dtype("fp16")


def test_a_failure_is_seen_by_all_and_only_in_its_own_program():
    store = dist.HashStore()
    first = [RankWatch(rank, store) for rank in (0, 1)]
    assert first[0].failed_rank() is None
    first[1].report_failure()
    assert first[0].failed_rank() == "rank 1"
    assert RankWatch(0, store).failed_rank() is None  # the next program of the same processes


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
