"""Step counts, the run's folder, and loading in the right precision."""

from __future__ import annotations

import random

import pytest
import torch
import yaml

from training.utils.engine.arguments import EngineArguments
from training.utils.engine.settings import EngineSettings
from training.utils.engine.setup import load_under, plan_settings, start_run, whole_steps
from training.utils.engine.startup import Ranks
from training.utils.layout.planner import PlanSettings
from training.utils.run.errors import ThreestepError
from training.utils.run.run_arguments import RunArguments


def ranks(world_size: int = 1, rank: int = 0) -> Ranks:
    return Ranks(rank, rank, world_size, torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "world_size", "rows", "expected"),
    [
        ({}, 1, 100, (6, 16)),
        ({}, 2, 100, (3, 32)),
        ({"gradient_accumulation_steps": 3}, 2, 100, (1, 96)),
        ({"num_train_epochs": 3.0}, 1, 100, (18, 16)),
        ({"max_train_steps": 4}, 1, 100, (4, 16)),
        ({"max_train_steps": 40}, 1, 100, (6, 16)),
    ],
)
def test_whole_steps(given, world_size, rows, expected):
    assert whole_steps(EngineArguments(**given), rows, ranks(world_size)) == expected


def test_rows_that_fill_no_step():
    with pytest.raises(
        ThreestepError,
        match=r"takes 64 sequences \(--per_device_train_batch_size 16 x 2 ranks x --gradient_accumulation_steps 2\) "
        "and 1 epochs of 63 training rows do not fill one",
    ):
        whole_steps(EngineArguments(gradient_accumulation_steps=2), 63, ranks(2))


def test_the_plan_is_the_flags():
    engine = EngineArguments(max_tokens_per_micro_batch=999)
    assert plan_settings(engine, 5, ranks(3)) == PlanSettings(3, 5, 999)


def test_a_run_starts_with_its_settings_and_its_seed(tmp_path):
    run = RunArguments(output_dir=str(tmp_path / "out"), seed=7)
    drawn = []
    for rank in (0, 0, 1):
        folder = start_run(run, {"seed": 7, "names": ["a"]}, ranks(2, rank))
        drawn.append((torch.rand(1).item(), random.random()))
    assert yaml.safe_load((folder.path / "config.yaml").read_text()) == {"seed": 7, "names": ["a"], "ranks": 2}
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]  # ranks differ in their dropout


def test_loading_gives_the_dtype():
    asked = []
    module = load_under(
        EngineSettings(dtype="bf16"), ranks(), lambda dtype: asked.append(dtype) or torch.nn.Linear(1, 1)
    )
    assert asked == [torch.bfloat16] and isinstance(module, torch.nn.Linear)
