"""Dynamic sampling draws the same prompts, counts the same and trains the same weights on one, two and three ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.invariants.dynamic_sampling_program import cases_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]  # on a busy machine
PROGRAM = Path(__file__).parent / "dynamic_sampling_program.py"
LARGEST_DIFFERENCE = 2.5e-4  # of the largest change


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([[3, 1], [4, 3]], id="two"),
        pytest.param(cases_of(["20", "5"]), id="every", marks=pytest.mark.long),
    ],
)
def test_any_number_of_ranks_trains_the_same(models, tmp_path, cases):
    ranks = (1, 2, 3)
    reports = [run_ranks(PROGRAM, each, [models, tmp_path, json.dumps(cases)], 3000)[0] for each in ranks]
    counted = {"replaced": 0.0, "kept_equal": 0.0, "dropped": 0.0}
    for seed, tries in cases:
        name = f"{seed}_{tries}"
        assert reports[0][name] == reports[1][name] == reports[2][name], name
        for told in reports[0][name]:
            counted = {each: count + told[f"dynamic_sampling/{each}"] for each, count in counted.items()}
        one, *others = (torch.load(tmp_path / f"{name}_{each}.pt") for each in ranks)
        change = largest_change(models, one)
        assert change > 1e-3, name  # or nothing is compared
        for other in others:
            apart = max(float((other[key] - one[key]).abs().max()) for key in one)
            assert apart < LARGEST_DIFFERENCE * change, (name, apart / change)
    assert min(counted.values()) > 0, counted


def largest_change(models: Path, state: dict[str, torch.Tensor]) -> float:
    from safetensors.torch import load_file

    start = load_file(models / "actor" / "model.safetensors")
    return max(float((state[key] - start[key]).abs().max()) for key in state)
