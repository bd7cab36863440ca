"""A model that cannot pack, or cannot be decoded as others are, trains all the same, and says so; `--padded` asks for
what it falls back to. Rows may be longer than the start model's positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SHARED, run_step
from tests.support.json_lines import read_lines
from tests.support.new_models import save_new_model
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer

pytestmark = pytest.mark.timeout(900)  # on a busy machine


@pytest.fixture(scope="module")
def bloom(place: Path) -> Path:
    """A Bloom shape, whose ALiBi takes no mask of segments, with a tokenizer."""
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    tokenizer = train_tokenizer(SENTENCES)
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=384, hidden_size=32, n_layer=2, n_head=2, eos_token_id=tokenizer.eos_token_id)
    BloomForCausalLM(config).save_pretrained(place / "bloom")
    tokenizer.save_pretrained(place / "bloom")
    return place / "bloom"


def losses(folder: Path) -> list[dict[str, float]]:
    lines = read_lines(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name.endswith(("loss", "step"))} for line in lines]


@pytest.mark.parametrize("step", [1, 2])
def test_a_model_that_cannot_pack_trains_padded_with_a_warning(place: Path, pairs_file: Path, bloom: Path, step: int):
    found = {}
    for padded in (False, True):
        folder = place / f"bloom_step{step}_{padded}"
        flags = ["--model_name_or_path", bloom, "--data_path", f"jsonl:{pairs_file}", *SHARED.split()]
        flags += ["--data_output_path", place / "bloom_cache", "--output_dir", folder, "--max_train_steps", 2]
        flags += ["--per_device_train_batch_size", 4, "--dtype", "fp32", "--padded", str(padded).lower()]
        ran = run_step(step, flags)
        assert ran.code == 0, ran.words
        found[padded] = ran.stdout.count("trains on padded rows"), losses(folder)
    assert found[False][0] == 1 and found[True][0] == 0
    assert len(found[True][1]) == 4 and found[False][1] == found[True][1]


def test_a_model_without_a_cache_is_rolled_out_all_the_same(place: Path, pairs_file: Path, bloom: Path):
    import torch
    from transformers import AutoTokenizer, OpenAIGPTConfig, OpenAIGPTLMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(bloom)
    torch.manual_seed(0)
    config = OpenAIGPTConfig(vocab_size=384, n_embd=32, n_layer=2, n_head=2, eos_token_id=tokenizer.eos_token_id)
    OpenAIGPTLMHeadModel(config).save_pretrained(place / "no_cache")
    tokenizer.save_pretrained(place / "no_cache")
    folder = place / "no_cache_step3"
    flags = ["--actor_model_name_or_path", place / "no_cache", "--data_path", f"jsonl:{pairs_file}", *SHARED.split()]
    flags += ["--data_output_path", place / "no_cache_data", "--output_dir", folder, "--dtype", "fp32"]
    flags += "--reward length --reward_length_characters 20 --advantage rloo --num_samples_per_prompt 2".split()
    flags += "--max_train_steps 2 --max_answer_seq_len 8 --per_device_generation_batch_size 4".split()
    ran = run_step(3, [*flags, "--per_device_training_batch_size", 8])
    assert ran.code == 0, ran.words
    assert ran.stdout.count("warning: OpenAIGPTLMHeadModel rolls out prompts of one length at a time without a") == 1
    lines = read_lines(folder / "metrics.jsonl")
    # Of what was drawn to what is trained.
    drift = [abs(line["mismatch/k1"]) for line in lines if "mismatch/k1" in line]
    assert len(drift) == 2 and max(drift) < 1e-5, lines


SFT = (
    "--data_path embedded --max_seq_len 96 --max_train_rows 16 --max_eval_rows 4 --eval_interval 0 --dtype fp32 "
    "--learning_rate 1e-3 --max_train_steps 3 --zero_stage 1 --lr_scheduler_type constant"
).split()


@pytest.mark.long
def test_more_positions_than_the_model_has(place: Path):
    """The trained model has them in its config.json, and reads rows that the start model was refused for."""
    start = save_new_model(place / "long_context_start", vocab_size=353)
    config = json.loads((start / "config.json").read_text())
    flags = [*SFT, "--max_seq_len", config["max_position_embeddings"] + 1, "--output_dir", place / "long_positions"]
    ran = run_step(1, ["--model_name_or_path", start, *flags])
    assert ran.code != 0 and "in steps 1 and 2, --rope_scaling" in ran.stderr + ran.stdout
    ran = run_step(1, ["--model_name_or_path", start, *flags, "--rope_scaling", "yarn:2"])
    assert ran.code == 0, ran.words
    saved = json.loads((place / "long_positions" / "model" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 2 * config["max_position_embeddings"]
    assert saved["rope_parameters"]["rope_type"] == "yarn" and saved["rope_parameters"]["factor"] == 2
