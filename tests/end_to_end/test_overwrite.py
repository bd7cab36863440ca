"""A finished run is replaced only if that is asked for, and stays whole where the new run is refused."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.conftest import Ran, run_step, save_start

pytestmark = pytest.mark.timeout(900)  # on a busy machine


def test_a_finished_run_is_replaced_by_the_flag_alone(place, pairs_file):
    start, out = save_start(place / "overwrite_start"), place / "overwritten"

    def sft(*more: str) -> Ran:
        flags = f"--model_name_or_path {start} --data_path jsonl:{pairs_file} --max_seq_len 100 --max_train_steps 1 "
        flags += f"--per_device_train_batch_size 2 --data_split 1,0,0 --data_output_path {place / 'overwrite_cache'}"
        return run_step(1, [*flags.split(), "--output_dir", out, *more])

    assert (ran := sft("--save_at_end", "--learning_rate", "1e-3")).code == 0, ran.words
    weights, steps = (out / "model" / "model.safetensors").read_bytes(), out / "checkpoints" / "step_000001"
    assert steps.is_dir()
    for more in ((), ("--overwrite", "--prompt_column", "questoin")):
        ran = sft(*more)
        assert ran.code == 2, ran.words
        assert ("no column 'questoin'" if more else "to replace that run") in ran.stderr, ran.words
        assert (out / "model" / "model.safetensors").read_bytes() == weights and steps.is_dir()
        assert "seconds" in json.loads((out / "summary.json").read_text())
    assert (ran := sft("--overwrite", "--learning_rate", "1e-2")).code == 0, ran.words
    assert (out / "model" / "model.safetensors").read_bytes() != weights and not steps.exists()
    assert len((out / "metrics.jsonl").read_text().splitlines()) > 0
    ran = sft()
    assert ran.code == 2 and f"--output_dir {out} holds a finished run (summary.json, model/config.json)" in ran.stderr
