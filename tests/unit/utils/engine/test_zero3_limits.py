"""What ZeRO-3 may hold whole and gather ahead, by size, memory and device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.ranks.devices import host_share
from training.utils.engine.ranks.startup import Ranks
from training.utils.engine.zero3 import ModelSizes, limits_of, model_sizes, zero3_limits

B7 = ModelSizes(weights=6_700_000_000, block=202_000_000, module=131_000_000)
B70 = ModelSizes(weights=70_000_000_000, block=856_000_000, module=1_051_000_000)


def live_and_ahead(sizes: ModelSizes, size: int, memory: float | None, on_gpu: bool = True) -> tuple[int, int]:
    limits = zero3_limits(sizes, size, None if memory is None else int(memory), on_gpu)
    assert limits["stage3_max_reuse_distance"] == limits["stage3_max_live_parameters"]
    return limits["stage3_max_live_parameters"], limits["stage3_prefetch_bucket_size"]


def test_a_cpu_has_room_for_two_blocks_or_a_block_and_the_largest_module():
    assert live_and_ahead(B7, 2, 256e9, on_gpu=False) == (404_000_000, 202_000_000)
    assert live_and_ahead(B70, 2, 256e9, on_gpu=False) == (1_907_000_000, 856_000_000)


def test_a_gpu_with_memory_to_spare_has_deepspeeds_default_at_least():
    for memory in (80e9, None):
        assert live_and_ahead(B7, 2, memory) == (1_000_000_000, 202_000_000)
        assert live_and_ahead(B70, 2, memory) == (1_907_000_000, 856_000_000)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_tenth_of_the_memory_is_the_most(size, on_gpu):
    live, ahead = live_and_ahead(B70, size, 16e9, on_gpu)
    assert live * size == 1.6e9 and ahead <= live
    assert live_and_ahead(B70, size, 1e6, on_gpu) == (30_000_000, 30_000_000)


def test_never_more_than_the_model():
    tiny = ModelSizes(weights=1000, block=300, module=100)
    assert live_and_ahead(tiny, 4, 80e9) == (1000, 300)
    assert live_and_ahead(ModelSizes(1, 1, 1), 4, 80e9, on_gpu=False) == (1, 1)


def test_the_sizes_of_a_model():
    model = nn.Module()
    model.table = nn.Embedding(50, 8)
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)])
    assert model_sizes(model) == ModelSizes(weights=400 + 3 * 144, block=144, module=400)
    assert model_sizes(nn.Linear(3, 2)) == ModelSizes(8, 8, 8)
    assert model_sizes(model.to("meta")).block == 144 and torch.device("meta") == model.table.weight.device


def test_ranks_of_one_host_share_its_memory(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    whole = host_share(1)
    assert whole > 2**30 and host_share(4) == whole // 4
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert host_share(4) == whole // 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_share(16) == whole // 8


def test_the_rank_with_the_least_memory_decides(monkeypatch):
    """Ranks that gathered in another order would wait for each other for ever."""
    from training.utils.engine import zero3 as module

    wide = nn.Linear(50_000, 50_000, bias=False, device="meta")
    ranks, settings = Ranks(0, 0, 1, torch.device("cpu")), EngineSettings(zero_stage=3)
    monkeypatch.setattr(module, "largest", lambda number, device: max(number, -int(4e9)))
    assert limits_of(wide, settings, ranks)["stage3_max_live_parameters"] == 100_000_000
    assert limits_of(wide, EngineSettings(zero_stage=2), ranks) == {}
