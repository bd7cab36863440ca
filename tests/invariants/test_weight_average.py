"""The moving average of trained weights equals one kept aside in float64, at every ZeRO stage."""

from __future__ import annotations

import pytest

from tests.invariants import average_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine

SIZES = (1, 2)
EVERY = [
    pytest.param(size, case, marks=[] if case in average_program.ORDINARY[size] else [pytest.mark.long])
    for size in SIZES
    for case in average_program.CASES
]


@pytest.mark.parametrize("world_size, case", EVERY)
def test_it_is_the_average_of_the_weights(launched, world_size, case):
    _, reports = launched("average_program", world_size)
    found = reports[0][case]
    # In bfloat16 the average itself is exact, and put in place it is rounded to 8 bits: weights here are below 2.
    rounding = 2**-8 if average_program.CASES[case][1] == "bf16" else 2e-7
    assert found["error"] <= rounding < found["moved"] / 2
    assert found["saved"] == (-1.0 if "lora" in case else 0.0)
    assert found["carried"] == 0.0


@pytest.mark.parametrize("world_size", SIZES)
def test_a_frozen_model_reads_the_same_from_cpu_memory(launched, world_size):
    _, reports = launched("average_program", world_size)
    assert reports[0]["offloaded"]["sharded"] < 1e-5 and reports[0]["offloaded"]["offloaded"] < 1e-5
