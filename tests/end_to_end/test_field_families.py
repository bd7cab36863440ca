"""SFT, a reward model, DPO and PPO run on tiny models of every family with its real tokenizer.

    pytest --long tests/end_to_end/test_field_families.py

The tokenizers and when they are skipped: see `test_field_tokenizers.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.conftest import run_step
from tests.families.configs import tiny_config
from tests.support.field_packages import Unavailable
from tests.support.field_references import reference_python
from tests.support.field_vendors import TOKENIZERS, folder_of
from training.utils.loading.tokenizers import load_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

NAMED = {one.name: one for one in TOKENIZERS}
# The family and its tokenizer; where no package has it, that of the nearest family.
FAMILIES = (
    ("gpt2", "GPT-2, as gpt2"),
    ("opt", "GPT-2, as opt"),
    ("gpt_neox", "GPT-2, as gpt2"),
    ("bloom", "GPT-2, as gpt2"),
    ("llama", "Llama 2"),
    ("llama", "Llama 3.1"),
    ("llama", "R1-Distill-Llama"),
    ("mistral", "Mistral 7B"),
    ("qwen2", "Qwen 3, as qwen2"),
    ("qwen2", "Llama 3.1 in a Qwen 2"),
    ("qwen3", "Qwen 3, as qwen3"),
    ("deepseek_v3", "DeepSeek"),
    ("gemma3_text", "Gemma 3"),
    ("glm4", "Qwen 3, as qwen3"),
    ("gpt_oss", "gpt-oss"),
)
TEXT = "add 12 and 345\n\n  it is   357, isn't it?"
COMMON = "--eval_fraction 0 --dtype fp32 --seed 1".split()
ONE_STEP = "--max_seq_len 96 --num_train_epochs 1 --per_device_train_batch_size 16".split()
DRAWN = "--max_prompt_seq_len 48 --max_answer_seq_len 8 --max_train_steps 1".split()
DRAWN += "--per_device_generation_batch_size 4 --generation_batches 1".split()


@pytest.mark.parametrize(("family", "name"), FAMILIES, ids=lambda one: one)
def test_every_step(family, name, tmp_path):
    start = tmp_path / "start"
    start.mkdir()
    try:
        folder_of(NAMED[name], reference_python(), start)
    except Unavailable as reason:
        pytest.skip(str(reason))
    save_model(family, start)
    expected = of_rows(start)
    rows = [{"question": f"add {n} and 1", "answer": f"it is {n + 1}", "rejected": "no idea"} for n in range(16)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--data_path", f"jsonl:{data}", "--data_output_path", tmp_path / "cache", *COMMON]
    for step in (1, 2, "dpo"):
        words = ["--model_name_or_path", start, "--output_dir", tmp_path / str(step), *own, *ONE_STEP]
        done = run_step(step, words)
        assert done.code == 0, done.words
        check_saved(tmp_path / str(step) / "model", expected)
    roles = ["--actor_model_name_or_path", tmp_path / "1" / "model"]
    roles += ["--critic_model_name_or_path", tmp_path / "2" / "model", "--output_dir", tmp_path / "ppo"]
    done = run_step(3, [*roles, *own, *DRAWN])
    assert done.code == 0, done.words
    check_saved(tmp_path / "ppo" / "model", expected)


def save_model(family: str, folder: Path) -> None:
    """Write a random model that has the tokenizer's tokens, and whose other tokens are its configuration's."""
    tokenizer = load_tokenizer(str(folder), end_may_pad=True)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    config = tiny_config(family, vocab_size=len(tokenizer), **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def of_rows(folder: Path) -> list[int]:
    """The ids of TEXT by the folder's tokenizer.json; by transformers where it has a vocabulary and merges."""
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    return AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"]


def check_saved(folder: Path, expected: list[int]) -> None:
    assert AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"] == expected
    assert of_rows(folder) == expected
