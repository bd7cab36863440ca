"""Runs that were stopped after each step and resumed end as those that were never stopped, to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.launch import ROOT, run_ranks
from tests.end_to_end.conftest import MODULES, SHARED, run_step, save_start

pytestmark = pytest.mark.timeout(900)  # on a busy machine
PROGRAM = ROOT / "tests" / "end_to_end" / "resume_program.py"
TIMES = ("seconds", "time/", "train/tokens_per_second", "train/pairs_per_second", "train/mfu", "reference/")
BATCH = "--per_device_train_batch_size 2 --learning_rate 1e-3 --report_mfu false --max_train_steps 3"


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    """A tiny model with dropout, so that a run draws random numbers as it trains."""
    folder = save_start(place / "start_resume")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    return folder


def run_program(place: Path, name: str, world_size: int, runs: list[tuple[str, list[object], Path]]) -> list[str]:
    """Run (module, flags, folder) one after the other on every rank; return how each ended on rank 0."""
    note = place / f"{name}_rank_"
    wanted = {
        "runs": [
            {"module": module, "flags": [str(flag) for flag in [*flags, "--output_dir", folder]], "note": str(note)}
            for module, flags, folder in runs
        ]
    }
    (place / f"{name}.json").write_text(json.dumps(wanted))
    environment = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    run_ranks(PROGRAM, world_size, [place / f"{name}.json"], 600, environment)
    return Path(f"{note}0").read_text().splitlines()


def figures(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """What a run told, without what a clock gave."""
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    plain = [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in lines]
    return [line for line in plain if len(line) > 1]  # more than a step


def same(unbroken: Path, resumed: Path, models: tuple[str, ...] = ("model",)) -> None:
    assert figures(unbroken) == figures(resumed)
    for model in models:
        mine, other = (load_file(folder / model / "model.safetensors") for folder in (unbroken, resumed))
        assert mine.keys() == other.keys()
        assert all(mine[name].equal(other[name]) for name in mine), model


RANKS = {"alone": (1, 0), "together": (2, 2)}


@pytest.mark.parametrize("name", RANKS)
def test_stopped_after_each_step_and_resumed(place: Path, start: Path, pairs_file: Path, name: str):
    world_size, stage = RANKS[name]
    root = place / f"resume_{world_size}"
    root.mkdir()
    data = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--data_output_path", place / "resume_cache"]
    trained = [*data, *BATCH.split(), "--zero_stage", stage, "--dtype", "fp32" if world_size == 2 else "bf16", "--eval_interval", 2]
    flags = {
        1: ["--model_name_or_path", start, *trained, "--neftune_alpha", 5],
        2: ["--model_name_or_path", start, *trained],
        "dpo": ["--model_name_or_path", start, *trained],
    }
    runs: list[tuple[str, list[object], Path]] = []
    for step, own in flags.items():
        unbroken, stopped = root / f"{step}_unbroken", root / f"{step}_stopped"
        runs.append((MODULES[step], own, unbroken))
        # Time is always short: each run ends after its first step, but for the last.
        runs += [(MODULES[step], [*own, "--resume", "--stop_before", 1], stopped)] * 3
    ended = run_program(root, "runs", world_size, runs)
    assert ended == ["done", "exit 0", "exit 0", "done"] * len(flags)
    for step in flags:
        models = ("model", "critic") if step == 3 else ("model",)
        same(root / f"{step}_unbroken", root / f"{step}_stopped", models)
        kept = sorted(path.name for path in (root / f"{step}_stopped" / "checkpoints").iterdir())
        assert kept == ["latest", "step_000001", "step_000002"]
