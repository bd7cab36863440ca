"""Rows that are longer than the start model's positions, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_step
from tests.support.new_models import save_new_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # on a busy machine

SFT = (
    "--data_path embedded --max_seq_len 96 --max_train_rows 16 --max_eval_rows 4 --eval_interval 0 --dtype fp32 "
    "--learning_rate 1e-3 --max_train_steps 3 --zero_stage 1 --lr_scheduler_type constant"
).split()


def test_more_positions_than_the_model_has(place: Path):
    """The trained model has them in its config.json, and reads rows that the start model was refused for."""
    start = save_new_model(place / "long_context_start", vocab_size=353)
    config = json.loads((start / "config.json").read_text())
    flags = [*SFT, "--max_seq_len", config["max_position_embeddings"] + 1, "--output_dir", place / "long_positions"]
    ran = run_step(1, ["--model_name_or_path", start, *flags])
    assert ran.code != 0 and "steps 1 and 2 give one more by --rope_scaling" in ran.stderr + ran.stdout
    ran = run_step(1, ["--model_name_or_path", start, *flags, "--rope_scaling", "yarn:2"])
    assert ran.code == 0, ran.words
    saved = json.loads((place / "long_positions" / "model" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 2 * config["max_position_embeddings"]
    assert saved["rope_parameters"]["rope_type"] == "yarn" and saved["rope_parameters"]["factor"] == 2
