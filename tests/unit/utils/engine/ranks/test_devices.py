"""What a rank takes of its machine: accelerator, device, allocator, threads; and --deterministic."""

from __future__ import annotations

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks import devices
from training.utils.engine.ranks.devices import (
    bound_kept_products,
    chosen_accelerator,
    device_of,
    set_allocator,
    set_threads,
    take_accelerator,
)
from training.utils.engine.training_engine import memory_explained

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("environment", "has_cuda", "expected"),
    [
        ({}, True, "cuda"),
        ({}, False, "cpu"),
        ({"DS_ACCELERATOR": "cpu"}, False, "cpu"),
        ({"DS_ACCELERATOR": ""}, True, "cuda"),
    ],
)
def test_the_accelerator_is_what_is_there_or_asked_for(environment, has_cuda, expected):
    assert chosen_accelerator(environment, has_cuda) == expected


@pytest.mark.parametrize(
    ("asked", "has_cuda", "sentence"),
    [
        ("npu", True, "DS_ACCELERATOR expects cpu or cuda, got 'npu'"),
        ("cuda", False, r"DS_ACCELERATOR=cuda asks for a GPU, and torch .* finds none here \(CUDA_VISIBLE_DEVICES=1\)"),
        ("cpu", True, "DS_ACCELERATOR=cpu, and CUDA has started in this process: set CUDA_VISIBLE_DEVICES="),
    ],
)
def test_an_accelerator_that_cannot_be_had(asked, has_cuda, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        chosen_accelerator({"DS_ACCELERATOR": asked, "CUDA_VISIBLE_DEVICES": "1"}, has_cuda)


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
    sentence = r"rank 1 of this host .* and 1 is visible \(CUDA_VISIBLE_DEVICES=5\): start at most 1 rank here"
    with pytest.raises(ThreestepError, match=sentence):
        device_of(1, 1)


def test_segments_grow_unless_the_user_set_the_allocator_or_vllm_sleeps_there():
    environment: dict[str, str] = {}
    set_allocator(environment, shares_gpu=True)
    assert environment == {}
    set_allocator(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
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


def test_what_has_no_deterministic_form_is_one_sentence():
    with (
        pytest.raises(ThreestepError, match=r"--deterministic: a forward of rows needs an operation .* \(cumsum_cuda"),
        memory_explained("a forward", 0, lambda: "rows"),
    ):
        raise RuntimeError("cumsum_cuda does not have a deterministic implementation, but you set ...")


def test_a_users_own_bounds_stay():
    environment = {"LRU_CACHE_CAPACITY": "77"}
    bound_kept_products(environment)
    assert environment == {"LRU_CACHE_CAPACITY": "77", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
