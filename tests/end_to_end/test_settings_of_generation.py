"""A start model whose settings of generation transformers refuses to save (Vicuna's) is trained, saved and exported in
every step; what cannot be read is refused before the first row is tokenized, on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.end_to_end.conftest import Ran, run_module, run_step, save_start
from threestep.command import commands

# Vicuna 7B v1.5's, but for its eos and bos tokens.
VICUNA = {"_from_model_config": True, "pad_token_id": -1, "max_length": 4096, "temperature": 0.9, "top_p": 0.6}
FLAGS = (
    "--max_seq_len 100 --per_device_train_batch_size 2 --dtype fp32 --max_train_steps 1 --report_mfu false "
    "--save_every 1"
)
MENDED = "its generation settings have pad_token_id -1, temperature 0.9, top_p 0.6, which transformers ignores"


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    folder = save_start(place / "vicuna")
    (folder / "generation_config.json").write_text(json.dumps(VICUNA))
    return folder


def run(step: int | str, start: Path, place: Path, rows: Path, out: str, *flags: str, ranks: int = 1) -> Ran:
    words = [*FLAGS.split(), "--data_path", f"jsonl:{rows}", "--data_output_path", place / "cache", *flags]
    return run_step(step, ["--model_name_or_path", start, "--output_dir", place / out, *words], ranks)


def assert_opens(folder: Path) -> None:
    settings = AutoModelForCausalLM.from_pretrained(folder).generation_config
    settings.validate(strict=True)
    assert settings.max_length == 4096 and settings.temperature is None and settings.pad_token_id is None


@pytest.mark.parametrize(
    ("step", "flags", "ranks"),
    [(1, "--lora_dim 2", 1), (1, "--zero_stage 3", 2), ("dpo", "", 1)],
)
def test_settings_that_transformers_refuses_to_save(place, pairs_file, start, step, flags, ranks):
    out = f"vicuna_{step}_{ranks}"
    ran = run(step, start, place, pairs_file, out, *flags.split(), ranks=ranks)
    assert ran.code == 0, ran.words
    assert ran.stdout.count(f"warning: '{start}': {MENDED}") == 1
    assert_opens(place / out / "model")
    if (export := commands().get("export")) is not None:  # a plugin's
        exported = run_module(export.module, [place / out, place / f"{out}_exported"])
        assert exported.code == 0, exported.words
        assert_opens(place / f"{out}_exported")


def test_settings_that_are_not_read(place, pairs_file):
    folder = save_start(place / "contradicts")
    (folder / "generation_config.json").write_text('{"num_return_sequences": 3}')
    with pytest.raises(ValueError, match="Greedy methods"):
        GenerationConfig.from_pretrained(folder)
    ran = run(1, folder, place, pairs_file, "refused", ranks=2)
    assert ran.code == 2 and "Traceback" not in ran.stderr
    assert ran.stderr.count("error: no generation settings (generation_config.json) could be loaded from") == 1
    assert not (place / "refused" / "metrics.jsonl").exists() and "tokenized" not in ran.stdout
