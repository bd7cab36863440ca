"""What a rank takes of its machine: accelerator, device, allocator, threads; and --deterministic. One process needs no
launcher; one rank's failure as the others see it (the processes that it ends: tests/distributed/test_leaving.py)."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.forked_programs import run_python
from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import DTYPE_NAMES
from training.utils.engine.ranks import devices, startup
from training.utils.engine.ranks.devices import (
    bound_kept_products,
    chosen_accelerator,
    device_of,
    measured_matmul_rate,
    set_allocator,
    set_threads,
    take_accelerator,
)
from training.utils.engine.ranks.startup import DTYPES, RankWatch, check_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("asked", "has_cuda", "expected"),
    [
        (None, True, "cuda"),
        (None, False, "cpu"),
        ("cpu", False, "cpu"),
        ("", True, "cuda"),
        ("npu", True, "DS_ACCELERATOR expects cpu or cuda, got 'npu'"),
        ("cuda", False, r"DS_ACCELERATOR=cuda needs a GPU, but torch .* finds none here \(CUDA_VISIBLE_DEVICES=1\)"),
        (
            "cpu",
            True,
            "DS_ACCELERATOR=cpu, but CUDA has already started in this process: also set CUDA_VISIBLE_DEVICES=",
        ),
    ],
)
def test_the_accelerator_is_what_is_there_or_asked_for(asked, has_cuda, expected):
    environment = {"CUDA_VISIBLE_DEVICES": "1"} | ({} if asked is None else {"DS_ACCELERATOR": asked})
    if expected in ("cpu", "cuda"):
        assert chosen_accelerator(environment, has_cuda) == expected
    else:
        with pytest.raises(ThreestepError, match=expected):
            chosen_accelerator(environment, has_cuda)


def test_the_cpu_of_a_machine_with_gpus_hides_them(monkeypatch):
    environment = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: environment["CUDA_VISIBLE_DEVICES"] != "")
    take_accelerator(environment)
    assert environment == {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    unset = {"CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    take_accelerator(unset)
    assert unset == {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_a_rank_has_the_gpu_of_its_number_and_more_ranks_than_gpus_are_refused(monkeypatch):
    assert device_of(3, 0) == CPU and device_of(1, 2) == torch.device("cuda", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    sentence = r"rank 1 of this host .* but 1 is visible \(CUDA_VISIBLE_DEVICES=5\): start at most 1 rank here"
    with pytest.raises(ThreestepError, match=sentence):
        device_of(1, 1)


def test_segments_grow_unless_the_user_set_the_allocator_or_vllm_sleeps_there():
    environment: dict[str, str] = {}
    set_allocator(environment, shares_gpu=True)
    assert environment == {}
    set_allocator(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    bounds = {"LRU_CACHE_CAPACITY": "77"}
    bound_kept_products(bounds)
    assert bounds == {"LRU_CACHE_CAPACITY": "77", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}  # the user's own stays
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        theirs = {name: "max_split_size_mb:128"}
        set_allocator(theirs)
        assert theirs == {name: "max_split_size_mb:128"}


@pytest.mark.parametrize(
    ("environment", "world_size", "expected"),
    [
        ({}, 4, 3),
        ({"LOCAL_WORLD_SIZE": "2"}, 4, 6),
        ({"LOCAL_SIZE": "32"}, 64, 1),
        ({"OMP_NUM_THREADS": "5"}, 4, None),
        ({}, 1, None),
    ],
)
def test_the_ranks_of_a_host_share_its_cores(monkeypatch, environment, world_size, expected):
    asked: list[int] = []
    monkeypatch.setattr(devices, "cores", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    set_threads(environment, world_size)
    assert asked == ([] if expected is None else [expected])


def test_the_log_says_on_what_it_runs(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(devices, "cores", lambda: 12)
    say = devices.device_sentence
    assert say(CPU, 1, False, {}) == "1 rank on cpu, 3 threads (of 12 cores)"
    assert say(CPU, 2, True, {"OMP_NUM_THREADS": "3"}) == (
        "2 ranks on cpu, 3 threads each (OMP_NUM_THREADS); --deterministic changes nothing on a CPU"
    )
    expected = "2 ranks on cuda, 3 threads each (of 12 cores), a GPU; allocator: x:True; deterministic"
    assert say(CUDA, 2, True, {"PYTORCH_ALLOC_CONF": "x:True"}) == expected


def test_deterministic_is_cudas(monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    for module, name in ((torch.utils.deterministic, "fill_uninitialized_memory"), (torch.backends.cudnn, "benchmark")):
        monkeypatch.setattr(module, name, True)
    environment: dict[str, str] = {}
    devices.make_deterministic(CPU, environment)
    assert (asked, environment) == ([], {})
    devices.make_deterministic(CUDA, environment)
    assert (asked, environment) == ([True], {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert not torch.utils.deterministic.fill_uninitialized_memory and not torch.backends.cudnn.benchmark


SCRIPT = """
import resource, sys, torch
from training.utils.engine.ranks.devices import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("the C library has no mallopt")
for _ in range(20):  # the first blocks are new: each is aligned anew until one fits into what was freed
    torch.ones(16 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(16 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def numbers_of(*words):
    """What a process of its own, which has imported torch, prints."""
    done = run_python(["-c", *words])
    if "no mallopt" in done.stderr:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def test_the_same_large_block_is_not_zeroed_again():
    # 64 MiB are 16,384 pages of 4 KiB: ten fresh blocks touch 163,840 of them (fewer with huge pages).
    (kept,), (left,) = numbers_of(SCRIPT, "keep"), numbers_of(SCRIPT, "leave")
    assert kept < left / 5


HOLES = """
import sys, torch
from training.utils.engine.ranks.devices import give_back_freed_memory, keep_freed_memory
if not keep_freed_memory():
    sys.exit("the C library has no mallopt")
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
blocks = [torch.ones(2**18) for _ in range(200)]  # 1 MiB each
blocks = blocks[::20]  # what stays keeps the holes between from the end of the heap
kept = resident()
give_back_freed_memory(9)
ninth = resident()
give_back_freed_memory(10)
print(kept, ninth, resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_every_tenth_step_gives_the_holes_back():
    kept, ninth, tenth = numbers_of(HOLES)
    assert abs(ninth - kept) < 2**22  # 4 MiB
    assert kept - tenth > 150 * 2**20  # of the 190 MiB that were freed


CPU = torch.device("cpu")


def test_rate_is_that_of_the_fastest_matmul(monkeypatch):
    """A clock that moves in matmuls alone: 2 x 64^3 FLOPs in 50 ms at best, warm-up not counted."""
    monkeypatch.setitem(devices._SIZES, "cpu", (64,))
    # Three to warm up, then 80 + 50 + 70 + 60 ms: with the fourth, 0.25 s have passed.
    times, now = [], 0.0
    for seconds in (0.01, 0.02, 0.01, 0.080, 0.050, 0.070, 0.060):
        times += [now, now + seconds]
        now += seconds
    monkeypatch.setattr(devices.time, "perf_counter", lambda: times.pop(0))
    assert measured_matmul_rate(torch.float32, CPU, seconds=0.25) == pytest.approx(2 * 64**3 / 0.050)
    assert times == []
    monkeypatch.undo()
    monkeypatch.setitem(devices._SIZES, "cpu", (64,))
    before = torch.get_rng_state()
    assert measured_matmul_rate(torch.bfloat16, CPU, seconds=0.001) > 0
    assert torch.equal(torch.get_rng_state(), before)


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
