"""What ZeRO-3 may hold whole and gather ahead, by size, memory and device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.utils.engine.zero3_limits import ModelSizes, model_sizes, zero3_limits

B7 = ModelSizes(weights=6_700_000_000, block=202_000_000, module=131_000_000)
B70 = ModelSizes(weights=70_000_000_000, block=856_000_000, module=1_051_000_000)


def live_and_ahead(sizes: ModelSizes, size: int, gpu_bytes: float | None) -> tuple[int, int]:
    limits = zero3_limits(sizes, size, gpu_bytes)
    assert limits["stage3_max_reuse_distance"] == limits["stage3_max_live_parameters"]
    return limits["stage3_max_live_parameters"], limits["stage3_prefetch_bucket_size"]


def test_room_for_two_blocks_or_a_block_and_the_largest_module():
    assert live_and_ahead(B7, 2, None) == (404_000_000, 202_000_000)
    assert live_and_ahead(B70, 2, None) == (1_907_000_000, 856_000_000)


def test_a_gpu_with_memory_to_spare_has_deepspeeds_default_at_least():
    assert live_and_ahead(B7, 2, 80e9) == (1_000_000_000, 202_000_000)
    assert live_and_ahead(B70, 2, 80e9) == (1_907_000_000, 856_000_000)


@pytest.mark.parametrize("size", [2, 4])
def test_a_tenth_of_a_gpu_is_the_most(size):
    live, ahead = live_and_ahead(B70, size, 16e9)
    assert live * size == 1.6e9 and ahead <= live


def test_never_more_than_the_model():
    tiny = ModelSizes(weights=1000, block=300, module=100)
    assert live_and_ahead(tiny, 4, 80e9) == (1000, 300)
    assert live_and_ahead(ModelSizes(1, 1, 1), 4, None) == (1, 1)


def test_the_sizes_of_a_model():
    model = nn.Module()
    model.table = nn.Embedding(50, 8)
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)])
    assert model_sizes(model) == ModelSizes(weights=400 + 3 * 144, block=144, module=400)
    assert model_sizes(nn.Linear(3, 2)) == ModelSizes(8, 8, 8)
    assert model_sizes(model.to("meta")).block == 144 and torch.device("meta") == model.table.weight.device
