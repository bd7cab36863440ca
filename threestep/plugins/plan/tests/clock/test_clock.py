"""The clock's seconds by hand and beside what others measured: devices, operators, collectives, steps, rollouts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from threestep.plugins.plan.clock.devices import (
    DEVICES,
    AttentionShares,
    Device,
    HostCosts,
    Links,
    Measured,
    Rates,
    Tiles,
    read_device,
)
from threestep.plugins.plan.clock.rollout import DecodePlan, decode_seconds, sum_seconds
from threestep.plugins.plan.clock.roofline import (
    MEMORY_SHARE,
    RUNNING_SHARE,
    matmul_rates,
    matmul_seconds,
    used_share,
    work_seconds,
)
from threestep.plugins.plan.clock.traffic import gather_seconds, zero_traffic
from threestep.plugins.plan.clock.training_step import StepPlan, step_parts
from threestep.plugins.plan.clock.work import Matmul, TrainingWork, Work
from threestep.plugins.plan.tests.conftest import flat, host_costs

WIDTHS = ((10.0, ((100.0, 1e9), (10_000.0, 3e9))), (1000.0, ((1000.0, 8e9),)))
MEASURED = Measured(
    WIDTHS,
    HostCosts(((1e3, 1e-5), (1e5, 3e-5)), ((1e3, 5e-6), (1e5, 7e-6)), 1e-3, document=(2e-5, 4e-5), token=(1e-4, 1e-9)),
    ((1e3, 1e9), (1e5, 3e9)),
    2e9,
    ((1e6, ((1.0, 1e9),)), (1e8, ((1.0, 5e9),))),
    1e9,
    (((1e3, 2e9), (1e5, 4e9)), ((1e3, 6e9),)),
    ((1.0, 2e-6), (100.0, 4e-6)),
)


@pytest.mark.parametrize("name", DEVICES)
def test_what_was_reached_lies_below_the_peak(name):
    device = DEVICES[name]
    for rates in (device.half, device.eighth):
        assert 0 <= rates.reached < rates.peak or rates.peak == rates.reached == 0
    assert 0 < device.attention.backward < device.attention.forward < 1
    assert device.links.between <= device.links.within and device.source and device.is_cuda
    assert device.single < device.half.peak


def test_measured_rates_and_seconds_lie_between_measured_sizes():
    """Half way between 1e3 and 1e5 by the logarithm is 1e4; beyond the ends they stay."""
    assert MEASURED.optimizer_rate(1e4) == pytest.approx(2e9)
    assert (MEASURED.optimizer_rate(10.0), MEASURED.optimizer_rate(1e9)) == (1e9, 3e9)
    assert MEASURED.optimizer_rate(1e5) == 3e9
    assert [MEASURED.thin_rate(weights, 7.0) for weights in (1.0, 1e7, 1e9)] == pytest.approx([1e9, 3e9, 5e9])
    assert MEASURED.thin_product_seconds(10.0) == pytest.approx(3e-6)
    assert [MEASURED.launch_seconds(size) for size in (0.0, 1e4, 1e9)] == pytest.approx([1e-5, 2e-5, 3e-5])
    assert MEASURED.launch_seconds(1e4, backward=True) == pytest.approx(6e-6)
    assert MEASURED.memory_rate(1e4) == pytest.approx(3e9) and MEASURED.memory_rate(1e4, backward=True) == 6e9


def test_a_products_rate_is_that_of_its_width_and_its_longest_side():
    """1,000 rows of 10 x 10: half way between 100 and 10,000 rows. A width of 100, the mean of 10 and 1,000 by the
    logarithm, lies half way between the 2 there and the 8."""
    for sides in ((1000, 10, 10), (10, 1000, 10), (10, 10, 1000)):
        assert MEASURED.matmul_rate(*sides) == pytest.approx(2e9)
    assert MEASURED.matmul_rate(1000, 10, 1000) == MEASURED.matmul_rate(100, 1000, 100) == pytest.approx(5e9)
    assert (MEASURED.matmul_rate(2, 2, 2), MEASURED.matmul_rate(9999, 9999, 9999)) == (1e9, 8e9)


def test_a_file_gives_the_device_back():
    device = replace(DEVICES["h100"], measured=MEASURED)
    assert read_device(device.as_json()) == device
    assert read_device(DEVICES["a100"].as_json()) == DEVICES["a100"]
    for text in ("[]", "{}", "no"):
        with pytest.raises((KeyError, TypeError, ValueError)):
            read_device(text)


def test_a_matmul_and_extrapolated_layers_by_hand():
    """One layer beside an embedding, and two: the difference is a layer; four of them and the embedding."""
    product = Matmul(batch=2, rows=3, columns=5, inner=7)
    assert product.flops == 2 * 2 * 3 * 5 * 7 and product.elements == 2 * (21 + 35 + 15)
    product = Matmul(1, 2, 2, 2)
    one = Work(Counter({product: 1}), 10.0, 5.0, 4.0, 3)
    two = Work(Counter({product: 2}), 20.0, 8.0, 6.0, 5)
    four = one.plus(two.plus(one, -1), 3)
    assert four == Work(Counter({product: 4}), 40.0, 14.0, 10.0, 9)
    assert four.matmul_flops == 4 * 16


SHARES, LINKS, TILES = AttentionShares(0.5, 0.25), Links(100, 10, 10), Tiles(4, 128, 256)
DEVICE = Device(Rates(100, 80), 80, 1000, SHARES, LINKS, TILES, "by hand", Rates(200), 50)


def test_the_last_round_of_tiles_and_the_edges_count():
    """Four tiles of 128 x 256 fill four processors; five take two rounds, unless smaller tiles fill them better."""
    assert used_share(Matmul(1, 512, 256, 64), DEVICE) == 1.0
    assert used_share(Matmul(1, 1, 256, 64), DEVICE) == pytest.approx(256 / (4 * 64 * 128))
    assert used_share(Matmul(4, 128, 256, 64), DEVICE) == 1.0


def test_a_matmul_takes_as_long_as_its_slower_side():
    large = Matmul(1, 8192, 8192, 8192)
    assert matmul_seconds(large, DEVICE, "bf16") == pytest.approx(2 * 8192**3 / 80e12)
    assert matmul_seconds(large, DEVICE, "fp8") == pytest.approx(2 * 8192**3 / (0.8 * 200e12))
    assert matmul_seconds(large, DEVICE, "fp32") == pytest.approx(2 * 8192**3 / (0.8 * 50e12))
    thin = Matmul(1, 1, 8192, 8192)
    read = 2 * (8192**2 + 2 * 8192) / (MEMORY_SHARE * 1e12)
    assert matmul_seconds(thin, DEVICE, "bf16") == pytest.approx(read)
    assert matmul_rates(replace(DEVICE, eighth=Rates(0)), "fp8") == DEVICE.half


def test_kinds_of_work_stand_apart():
    work = Work(Counter(), attention_flops=1e12, moved_bytes=9e9, fused_bytes=9e8, launches=100)
    forward = work_seconds(work, DEVICE)
    assert forward.attention == pytest.approx(1 / 50) and forward.memory == pytest.approx(0.01)
    assert forward.launches == pytest.approx(1e-3) and forward.device == pytest.approx(0.03)
    assert work_seconds(work, DEVICE, backward=True).attention == pytest.approx(1 / 25)
    assert work_seconds(work, DEVICE, fused=True).memory == pytest.approx(0.001)
    assert forward.running_at(0.5).device == pytest.approx(0.06)


def test_a_cpu_alone_computes_attention_document_by_document():
    """3 tensors put together, of 2e-5 seconds each, 2 further documents of 5e-5, or as an operator, 1,000 bytes at the
    memory's 1e12 a second, and 5e10 FLOPs at a quarter of the matmul peak of 100e12."""
    work = Work(apart_documents=2, apart_launches=3, apart_bytes=1000.0, apart_flops=5e10)
    costs = host_costs(1e-5, 2e-5, document=(0.0, 5e-5))
    found = work_seconds(work, replace(DEVICE, measured=flat(1e9, costs)), backward=True)
    forward = work_seconds(work, replace(DEVICE, measured=flat(1e9, costs)))
    assert (forward.launches, found.launches) == pytest.approx((3e-5 + 2e-5, 6e-5 + 1e-4))
    assert (found.memory, found.attention) == pytest.approx((1e-9, 2e-3))
    assert work_seconds(work, DEVICE, backward=True).device == work_seconds(work, DEVICE).launches == 0.0


@pytest.mark.parametrize(
    ("device", "ranks", "size", "bus"),
    [("h200", 8, 2**20, 40), ("h200", 8, 2**26, 347), ("b200", 32, 2**28, 229), ("b200", 32, 2**30, 362)],
)
def test_it_is_near_measured_all_reduces(device, ranks, size, bus):
    """Bus bandwidths in GB/s of all-reduces of `size` bytes (stas00/ml-engineering 744d01e, network pages), which are
    a reduction that scatters and a gather."""
    measured = size * 2 * (ranks - 1) / ranks / (bus * 1e9)
    assert 2 * gather_seconds(size, ranks, DEVICES[device]) == pytest.approx(measured, rel=0.4)


def test_bytes_of_stages():
    """Stages 0 to 2 move twice the weights in a step of one micro-batch, stage 3 three times (arXiv 1910.02054)."""
    for stage, times in ((0, 2), (1, 2), (2, 2), (3, 3)):
        assert sum(zero_traffic(5.0, 5.0, stage)) == times * 5.0
    assert zero_traffic(5.0, 5.0, 2).reduced == zero_traffic(5.0, 5.0, 1).reduced_once == 5.0


H100 = DEVICES["h100"]
FORWARD = Work(Counter({Matmul(1, 16384, 8192, 8192): 10}), launches=10)
WORK = TrainingWork(FORWARD, FORWARD.plus(FORWARD), Work())
PLAN = StepPlan(weights=1e9, trained=1e9, layers=10, ranks=1, micro_steps=1)


def test_micro_steps_repeat_and_the_optimizer_does_not():
    once, thrice = (step_parts(WORK, replace(PLAN, micro_steps=steps), H100) for steps in (1, 3))
    assert thrice["matmuls"] == pytest.approx(3 * once["matmuls"]) and thrice["optimizer"] == once["optimizer"]
    assert once["optimizer"] == pytest.approx(34e9 / (0.9 * 3.35e12))
    assert set(once) == {"matmuls", "optimizer"}


def test_recomputation_is_a_forward_again_and_kernels_reach_a_share_of_their_rates():
    parts = step_parts(WORK, replace(PLAN, recomputed=1.0), H100)
    assert parts["recomputation"] == pytest.approx(parts["matmuls"] / 3)
    alone, among = (step_parts(WORK, PLAN, H100, share)["matmuls"] for share in (1.0, RUNNING_SHARE))
    assert among == pytest.approx(alone / RUNNING_SHARE)


def test_traffic_hides_behind_computation_and_a_small_model_waits_for_the_host():
    near = step_parts(WORK, replace(PLAN, ranks=8, zero_stage=3), H100)
    wide = step_parts(WORK, replace(PLAN, weights=1e11, trained=1e11, ranks=64, zero_stage=3), H100)
    small_batch = Work(Counter({Matmul(1, 1, 8192, 8192): 10}))
    bare = step_parts(TrainingWork(small_batch, small_batch, Work()), replace(PLAN, ranks=8, zero_stage=3), H100)
    assert near["traffic"] < 0.02 * near["matmuls"]  # of the first layer
    assert wide["traffic"] > wide["matmuls"] and bare["traffic"] > bare["matmuls"]
    tiny = Work(Counter({Matmul(1, 8, 64, 64): 100}), launches=100)
    parts = step_parts(TrainingWork(tiny, tiny, Work()), PLAN, H100)
    assert parts["kernel launches by the host"] > 10 * parts["matmuls"]


def test_shards_and_offload():
    sharded = step_parts(WORK, replace(PLAN, ranks=8, zero_stage=1), H100)
    assert sharded["optimizer"] == pytest.approx(step_parts(WORK, PLAN, H100)["optimizer"] / 8)
    offloaded = step_parts(WORK, replace(PLAN, ranks=8, zero_stage=1, offloads=True), H100)
    assert "optimizer" not in offloaded
    assert offloaded["optimizer on the host"] > sharded["optimizer"] and offloaded["offload"] > 0


def test_a_measured_cpu_launches_beside_its_work_and_at_its_rates():
    """By hand: 10 products of 2.2e12 FLOPs at 1e9 a second, three times; 10 launches of 1e-5 and 20 of 2e-5 seconds; a
    head of 5 at the forward's and 100 bytes at 50 a second; 1e9 numbers at 1e8 a second; a step and a micro-step
    0.2 and 0.05, for each layer 0.03 and 0.01."""
    costs = host_costs(1e-5, 2e-5, 0.2, 0.05, layer=0.03, layer_micro_step=0.01)
    measured = flat(1e9, costs)._replace(optimizer=((1.0, 1.0), (PLAN.trained, 1e8)))
    cpu = replace(H100, measured=measured)
    parts = step_parts(WORK._replace(head=Work(moved_bytes=100.0, launches=5)), PLAN, cpu)
    assert parts["matmuls"] == pytest.approx(30 * 2 * 16384 * 8192 * 8192 / 1e9)
    assert parts["kernel launches by the host"] == pytest.approx(10e-5 + 20 * 2e-5 + 5e-5)
    assert parts["output layer"] == 2.0 and parts["optimizer"] == 10.0
    assert parts["the step itself"] == pytest.approx(0.25 + PLAN.layers * 0.04)
    thrice = step_parts(WORK, replace(PLAN, micro_steps=3), cpu)
    assert thrice["the step itself"] == pytest.approx(0.2 + 3 * 0.05 + PLAN.layers * (0.03 + 3 * 0.01))


# Llama 3.1 8B in 16 bits: 128 KiB of cache a token.
EIGHT_B = DecodePlan(8.03e9, 2, 131072, sequences=1, prompt=0, answer=100, launches=0)


@pytest.mark.parametrize(
    ("device", "sequences", "prompt", "measured"),
    [
        ("h100", 1, 0, 6.48e-3),
        ("h100", 4, 0, 6.59e-3),
        ("a100-40", 1, 1024, 1 / 75),
        ("a100-40", 8, 1024, 8 / 75 / 6.6),
    ],
)
def test_it_is_near_what_others_measured(device, sequences, prompt, measured):
    """Seconds a step of vLLM 0.21 on an H100 (yobitelcomm bench, whose lengths are not said), and of 0.23 on an A100
    (johnmusgrave.com: 1,024 tokens before 128)."""
    plan = EIGHT_B._replace(sequences=sequences, prompt=prompt, answer=128)
    assert decode_seconds(plan, DEVICES[device]) / 128 == pytest.approx(measured, rel=0.15)


def test_a_gpu_reads_the_cache_computes_and_waits_for_the_host():
    few, many = (decode_seconds(EIGHT_B._replace(sequences=count, prompt=4096), H100) for count in (1, 33))
    assert many - few == pytest.approx(100 * 32 * 131072 * 4146 / (0.9 * 3.35e12) / 0.854, rel=0.01)
    batch = EIGHT_B._replace(sequences=4096, cache_bytes=0.0)
    assert decode_seconds(batch, H100) == pytest.approx(100 * 2 * 8.03e9 * 4096 / 794.5e12 / 0.854)
    assert decode_seconds(EIGHT_B._replace(launches=1200), H100) == pytest.approx(100 * 1200 * 10e-6)


def test_a_cpu_draws_by_what_its_cache_holds():
    """Five tokens of 3 sequences: 4 products of a million weights at 1e9 FLOP/s, of more at half of that, and 2e-5
    seconds besides for each; a cache of 100 bytes a token of 52.5, read at 1e6 a second; 10 launches of 1e-5 seconds;
    1e-4 seconds a token besides, and 1e-7 for each of 3 x 700 logits."""
    rates = ((2e6, ((1.0, 1e9),)), (9e7, ((1.0, 5e8),)))
    measured = flat(1e12, host_costs(1e-5, 1.0, token=(1e-4, 1e-7)), cached=1e6)
    measured = measured._replace(thin=rates, thin_products=((1.0, 2e-5),))
    plan = DecodePlan(1e6, 4, 100, sequences=3, prompt=50, answer=5, launches=10, products=4, vocabulary=700)
    for weights, rate in ((1e6, 1e9), (1e8, 5e8)):
        found = decode_seconds(plan._replace(weights=weights), replace(H100, measured=measured), "fp32")
        besides = 4 * 2e-5 + 3 * 100 * 52.5 / 1e6 + 10 * 1e-5 + 1e-4 + 3 * 700 * 1e-7
        assert found == pytest.approx(5 * (2 * weights * 3 / rate + besides))


def test_a_cpus_cache_holds_weights_and_keys_together():
    """A million weights, and a million numbers of keys and values in 4 bytes: rates of two million weights."""
    rates = ((1e6, ((1.0, 1e9),)), (2e6, ((1.0, 5e8),)))
    device = replace(H100, measured=flat(1e12, host_costs(0.0, 0.0), cached=math.inf)._replace(thin=rates))
    plan = DecodePlan(1e6, 4, 4e6 / 50, sequences=1, prompt=0, answer=100, launches=0)
    assert decode_seconds(plan, device, "fp32") == pytest.approx(100 * 2e6 / 5e8)


def test_ranks_that_draw_together_add_up_two_outputs_a_layer():
    """A token of 10 sequences x 100 numbers x 2 bytes; two ranks of a node: a hop of 3 us and half of 2,000 bytes at
    0.8 x 450 GB/s, four times a layer and token, and once more for the prompt of 50 tokens."""
    plan = DecodePlan(1e6, 2, 100, sequences=10, prompt=50, answer=7, launches=0)
    token, prompt = (3e-6 + 0.5 * size / (0.8 * 450e9) for size in (2000, 100_000))
    found = sum_seconds(plan, 3, 100, 2, device=DEVICES["h100"])
    assert found == pytest.approx(2 * 3 * 2 * (prompt + 7 * token))
    assert sum_seconds(plan, 3, 100, 1, device=DEVICES["h100"]) == 0
