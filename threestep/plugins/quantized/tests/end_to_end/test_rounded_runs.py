"""Runs on rounded weights: stopped and resumed to the bit on two ranks, and exported as they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.compared import figures, same
from tests.end_to_end.conftest import MODULES, SHARED, run_program, save_start
from tests.end_to_end.test_resume import BATCH
from threestep.plugins.programs import export
from threestep.plugins.programs.tests.end_to_end.test_export_end_to_end import (
    LORA,
    TRAINED,
    data_of,
    run_all,
    same_apart,
    same_folder,
)

pytestmark = pytest.mark.timeout(900)  # on a busy machine
INT8 = [*LORA, "--load_in_8bit"]


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    return save_start(place / "start_rounded")


@pytest.fixture(scope="module")
def run(place: Path, pairs_file: Path, start: Path) -> Path:
    """A run of step 1 in bfloat16 with ZeRO 2."""
    folder = place / "rounded"
    flags = ["--model_name_or_path", start, *data_of(place, pairs_file), *TRAINED.split(), *INT8]
    run_all(place, "rounded_run", 1, [(1, [*flags, "--zero_stage", 2, "--dtype", "bf16"], folder)])
    return folder


def test_what_is_exported_is_what_was_saved(run, tmp_path):
    export.main([str(run), str(tmp_path / "out")])
    same_folder(tmp_path / "out", run / "model")


def test_lora_kept_apart_is_what_peft_loads(run, start, tmp_path):
    same_apart(run, start, tmp_path)


def test_dpo_goes_on_where_it_was_stopped(place, pairs_file, start):
    """Float32 with ZeRO 2, on two ranks."""
    root = place / "resume_rounded"
    root.mkdir()
    data = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--data_output_path", place / "resume_cache"]
    flags = ["--model_name_or_path", start, *data, "--dtype", "fp32", *BATCH.split(), "--zero_stage", 2, *INT8]
    unbroken, stopped = root / "unbroken", root / "stopped"
    runs = [
        (MODULES["dpo"], flags, unbroken),
        (MODULES["dpo"], [*flags, "--stop_before", "1s"], stopped),
        (MODULES["dpo"], [*flags, "--resume"], stopped),
    ]
    assert run_program(root, "runs", 2, runs) == ["done", "exit 0", "done"]
    same(unbroken, stopped)
    assert figures(unbroken, "samples.jsonl") == figures(stopped, "samples.jsonl") != []
