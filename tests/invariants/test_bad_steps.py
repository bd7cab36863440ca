"""An optimizer step whose loss or gradient is not finite changes nothing, at any ZeRO stage, on any rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

PROGRAM = Path(__file__).with_name("bad_step_program.py")
WEIGHTS = {"first.weight", "first.bias", "second.weight", "second.bias"}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_bad_step_changes_nothing(world_size: int) -> None:
    """Good, bad three times, good, good: only one micro-batch of the last rank goes wrong."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    reports = run_ranks(PROGRAM, world_size, timeout_seconds=280, environment=environment)
    assert len(reports[0]) == 10
    for rank in reports:
        for name, seen in rank.items():
            assert seen["skipped"] == [False, True, True, True, False, False], name
            assert [set(moved) for moved in seen["moved"][1:4]] == [set(), set(), set()], name
            assert WEIGHTS == set(seen["moved"][0]) | set(seen["moved"][4]), name
            # the schedule waits too: the warm-up's second rate is that of the second good step
            assert seen["rates"][1] == seen["rates"][2] == seen["rates"][3] == seen["rates"][4] < seen["rates"][5], name
            assert seen["finite"] and seen["same"], name
