"""DecodePlan: by the memory, by arithmetic, by the host."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from threestep.plugins.plan.clock.devices import DEVICES
from threestep.plugins.plan.clock.rollout import DecodePlan, decode_seconds, sum_seconds
from threestep.plugins.plan.tests.flat_cpu import flat, host_costs

H100 = DEVICES["h100"]
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


def test_the_cache_is_read_for_every_sequence():
    few, many = (decode_seconds(EIGHT_B._replace(sequences=count, prompt=4096), H100) for count in (1, 33))
    assert many - few == pytest.approx(100 * 32 * 131072 * 4146 / (0.9 * 3.35e12) / 0.854, rel=0.01)


def test_many_short_sequences_compute_and_eager_steps_wait_for_the_host():
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
