"""The recipes of training/step*/configs, and the shapes of the models that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

TRAINING = Path(__file__).parents[2] / "training"
RECIPES = sorted(path for path in TRAINING.glob("step*/configs/*.yaml"))
SIZES = ("opt_125m", "opt_1.3b", "qwen2.5_7b", "gemma_7b_lora", "llama2_13b", "llama3.1_70b")

# The numbers of the models' own config.json, and how many weights their cards give them.
_LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
ARCHITECTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "facebook/opt-125m": (
        125_239_296,
        dict(model_type="opt", hidden_size=768, ffn_dim=3072, num_hidden_layers=12, num_attention_heads=12,
             vocab_size=50272, max_position_embeddings=2048, word_embed_proj_dim=768),
    ),
    "facebook/opt-1.3b": (
        1_315_758_080,
        dict(model_type="opt", hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32,
             vocab_size=50272, max_position_embeddings=2048, word_embed_proj_dim=2048),
    ),
    "Qwen/Qwen2.5-7B": (
        7_615_616_512,
        dict(model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
             num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, max_position_embeddings=131072,
             tie_word_embeddings=False),
    ),
    "google/gemma-7b": (
        8_537_680_896,
        dict(model_type="gemma", hidden_size=3072, intermediate_size=24576, num_hidden_layers=28,
             num_attention_heads=16, num_key_value_heads=16, head_dim=256, vocab_size=256000,
             max_position_embeddings=8192),
    ),
    "meta-llama/Llama-2-13b-hf": (
        13_015_864_320,
        dict(_LLAMA, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
             num_key_value_heads=40, vocab_size=32000, max_position_embeddings=4096),
    ),
    "meta-llama/Llama-3.1-70B": (
        70_553_706_496,
        dict(_LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
             num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072),
    ),
}  # fmt: skip
ARCHITECTURES["Qwen/Qwen2.5-7B-Instruct"] = ARCHITECTURES["Qwen/Qwen2.5-7B"]


def hub_name(recipe: Path) -> str:
    """What the first step's recipe of the same size starts from."""
    size = next(size for size in SIZES if recipe.stem.startswith(size))
    return yaml.safe_load((TRAINING / "step1_sft" / "configs" / f"{size}.yaml").read_text())["model_name_or_path"]


def flags_for(recipe: Path, folder: Path) -> list[str]:
    """The recipe's models replaced by `folder`."""
    values = yaml.safe_load(recipe.read_text())
    return [flag for name in values if name.endswith("model_name_or_path") for flag in (f"--{name}", str(folder))]


def gpus_of(recipe: Path) -> tuple[int, int]:
    """How many GPUs of how many gigabytes the recipe says that it needs."""
    found = re.search(r"^# For (\d+) GPUs? of (\d+) GB", recipe.read_text(), re.MULTILINE)
    assert found is not None, recipe
    return int(found[1]), int(found[2])
