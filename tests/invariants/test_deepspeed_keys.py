"""Every accepted key of DeepSpeed's JSON changes a run on two ranks as its documentation says, and nothing else: the
weights at the end are those of a run without it, unless the key is one that rounds or clips."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.invariants.keys_program import CASES, TOGETHER
from threestep.plugins.deepspeed_json.keys import ACCEPTED

PROGRAM = Path(__file__).with_name("keys_program.py")
AGREED = {"zero_optimization.stage", "bf16.enabled", "fp16.enabled"}  # refused where they differ from the flags
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]  # on a busy machine


@pytest.fixture(scope="module")
def reports() -> dict:
    environment = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return run_ranks(PROGRAM, 2, timeout_seconds=560, environment=environment)[0]


def test_every_accepted_key_is_tried():
    assert set(CASES) == set(ACCEPTED) - AGREED


@pytest.mark.parametrize("dotted", CASES)
def test_it_changes_what_it_is_for(reports, dotted):
    without, with_key = reports[dotted]
    kinds = CASES[dotted].sees.split("+")
    for kind in kinds:
        if kind in with_key:
            assert with_key[kind] != without[kind], kind
        else:
            assert kind in with_key["said"] and kind not in without["said"]
    if "weights" not in kinds and "scales" not in kinds:
        assert with_key["weights"] == pytest.approx(without["weights"], abs=1e-6)


@pytest.mark.parametrize("name", TOGETHER)
def test_together_they_leave_the_weights_alone(reports, name):
    without, together = reports[name]
    assert together["weights"] == pytest.approx(without["weights"], abs=1e-6)
