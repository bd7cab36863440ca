"""The formulas of memory, against the figures of the ZeRO paper and by hand."""

from __future__ import annotations

import pytest

from threestep.plugins.plan.dry_run.engine_memory import (
    _states_of,
    gathered_elements,
    pinned_shards,
    trained_memory,
    weights_memory,
)
from training.utils.engine.config.arguments import ADAMW, OPTIMIZERS
from training.utils.plugins.plugin import OptimizerEntry

BUCKETS = {"reduce_bucket_size": 500, "stage3_max_live_parameters": 300, "stage3_max_reuse_distance": 300}


def held(weights: int, dtype: str, zero: dict, ranks: int, trained: int | None = None) -> tuple[int, int]:
    memory = trained_memory(weights, trained or weights, 100, dtype, zero={**BUCKETS, **zero}, ranks=ranks)
    return sum(line.device_bytes for line in memory.held), sum(line.host_bytes for line in memory.held)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_it_is_figure_1_of_the_zero_paper(stage, gigabytes):
    """Rajbhandari et al. 2020, figure 1: 7.5 billion weights in float16 on 64 GPUs."""
    device, host = held(7_500_000_000, "fp16", {"stage": stage}, 64)
    assert device / 1e9 == pytest.approx(gigabytes, abs=0.05) and host == 0


def test_bf16_adds_gradients_up_in_float32():
    # 2 weights + 4 gradients / 2 ranks + 12 / 2 = 2 + 2 + 6
    assert held(1000, "bf16", {"stage": 2}, 2) == (10_000, 0)
    # stage 1 keeps the float32 sums whole, beside the bf16 gradients: 2 + 6 + 12 / 2
    assert held(1000, "bf16", {"stage": 1}, 2) == (14_000, 0)


def test_bfloat16_states_are_a_third_of_the_others():
    """1000 weights on 2 ranks: 2 weights + 2 gradients / 2 + (2 + 4) / 2."""
    for stage, bytes_a_weight in ((1, 2 + 2 + 3), (2, 2 + 1 + 3), (3, 1 + 1 + 3)):
        memory = trained_memory(1000, 1000, 100, "bf16", zero={**BUCKETS, "stage": stage}, ranks=2, bf16_states=True)
        assert sum(line.device_bytes for line in memory.held) == 1000 * bytes_a_weight


def test_offload_moves_the_optimizer_and_at_stage_3_everything():
    cpu = {"device": "cpu"}
    # device: 2 weights + 4 / 2 gradients; host: 12 / 2 and the optimizer's float32 gradients, 4 / 2
    assert held(1000, "bf16", {"stage": 2, "offload_optimizer": cpu}, 2) == (4000, 8000)
    # host: (2 + 4 + 12 + 4) / 2
    assert held(1000, "bf16", {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}, 2) == (0, 11_000)


def test_only_what_trains_has_gradients():
    assert held(1000, "fp32", {"stage": 0}, 1, trained=16) == (4 * 1000 + 12 * 16, 0)


@pytest.mark.parametrize(("stage", "optimizer"), [(0, 8), (1, 8 / 2), (2, 8 / 2), (3, 12 / 2)])
def test_float32_weights_are_held_once_below_stage_3(stage, optimizer):
    memory = trained_memory(1000, 1000, 100, "fp32", zero={**BUCKETS, "stage": stage}, ranks=2)
    assert memory.optimizer.device_bytes == 1000 * optimizer


def test_stage_3_gathers_what_may_live():
    memory = trained_memory(1000, 1000, 100, "bf16", zero={**BUCKETS, "stage": 3}, ranks=2)
    assert memory.buffers.device_bytes == (500 + 300 + 100) * 2
    one_large = trained_memory(1000, 1000, 900, "bf16", zero={**BUCKETS, "stage": 3}, ranks=2)
    assert one_large.buffers.device_bytes == (500 + 1000) * 2  # no more than there is
    far = trained_memory(
        1000, 1000, 100, "bf16", zero={**BUCKETS, "stage": 3, "stage3_max_reuse_distance": 1200}, ranks=2
    )
    assert far.buffers.device_bytes == (500 + 600 + 100) * 2


def test_a_backward_finds_the_last_of_the_forward_still_whole():
    """Half of the distance of 800 comes before the backward begins, and a module of 100 is gathered beside it."""
    zero = {**BUCKETS, "stage": 3, "stage3_max_reuse_distance": 800}
    assert gathered_elements(1000, 100, zero, trains=True) == 400 + 100
    assert gathered_elements(1000, 100, zero, trains=False) == 300 + 100
    assert gathered_elements(450, 100, zero, trains=True) == 450  # there are no more


def test_a_second_copy_is_sharded_over_a_node():
    zero = {**BUCKETS, "stage": 3, "zero_hpz_partition_size": 4}
    plain, with_copy = (held(1000, "bf16", {**zero, **other}, 8) for other in ({"zero_hpz_partition_size": 1}, {}))
    assert with_copy[0] - plain[0] == 2 * 1000 // 4
    on_host = trained_memory(
        1000, 1000, 100, "bf16", zero={**zero, "offload_param": {"device": "cpu"}}, ranks=8
    ).secondary
    assert (on_host.device_bytes, on_host.host_bytes) == (0, 500)


def test_pinned_memory_comes_in_powers_of_two():
    pinned = {"device": "cpu", "pin_memory": True}
    # stage 2, 500 weights a rank: float32 weights and gradients 2000 -> 2048 bytes each, bfloat16 1000 -> 1024
    memory = trained_memory(1000, 1000, 100, "bf16", zero={**BUCKETS, "stage": 2, "offload_optimizer": pinned}, ranks=2)
    assert memory.pinned.host_bytes == 48 + 48 + 24
    # stage 3: sums of gradients 2000 -> 2048, the step's in groups of 300 and what is left, weights 1000 -> 1024
    zero = {"stage": 3, "offload_optimizer": pinned, "offload_param": pinned, "sub_group_size": 300}
    memory = trained_memory(1000, 1000, 100, "bf16", zero={**BUCKETS, **zero}, ranks=2)
    assert memory.pinned.host_bytes == 48 + (2048 - 1200) + (1024 - 800) + 24
    # shards that are only read are pinned one by one: 2 x 150 -> 512, 2 x 128 -> 256
    assert pinned_shards([300, 256], "bf16", zero, 2).host_bytes == 212
    assert pinned_shards([300], "bf16", {"stage": 3, "offload_param": {"device": "cpu"}}, 2).host_bytes == 0


def test_a_frozen_model_has_weights_alone():
    line = weights_memory(1000, "bf16", {"stage": 0}, 4)
    assert (line.device_bytes, line.host_bytes) == (2000, 0)
    line = weights_memory(1000, "bf16", {"stage": 3, "offload_param": {"device": "cpu"}}, 4)
    assert (line.device_bytes, line.host_bytes) == (0, 500)


def test_what_optimizers_keep_of_each_weight(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "sign", OptimizerEntry("module:name"))
    assert _states_of(ADAMW) == (2, "AdamW's moments") and _states_of("sign") == (1, "states of sign")
