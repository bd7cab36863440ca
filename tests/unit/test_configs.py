"""Every recipe is parsed by its step's own program and resolved, its models are built on the meta device at their true
sizes, and what it is said to need fits into the GPUs that it names. Hub names are replaced by folders that hold a
configuration and nothing else."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

from training.utils.base import user_files
from training.utils.data.sources import registry

TRAINING = Path(__file__).parents[2] / "training"
RECIPES = sorted(path for path in TRAINING.glob("step*/configs/*.yaml"))
SIZES = ("opt_125m", "opt_1.3b", "qwen2.5_7b", "gemma_7b_lora", "llama2_13b", "llama3.1_70b")

# The numbers of the models' own config.json, and how many weights their cards give them.
_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
ARCHITECTURES = {
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


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a recipe's --dataset_module registers is forgotten after it."""
    registry.registered_names()
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr(user_files, "_loaded", {})


def hub_name(recipe: Path) -> str:
    """What the first step's recipe of the same size starts from."""
    size = next(size for size in SIZES if recipe.stem.startswith(size))
    return yaml.safe_load((TRAINING / "step1_sft" / "configs" / f"{size}.yaml").read_text())["model_name_or_path"]


def flags_for(recipe: Path, folder: Path) -> list[str]:
    """The recipe's models replaced by `folder`."""
    values = yaml.safe_load(recipe.read_text())
    return [flag for name in values if name.endswith("model_name_or_path") for flag in (f"--{name}", str(folder))]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_a_recipe_resolves_and_fits_the_gpus_it_names(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(TRAINING.parent)  # where a recipe names files of the project
    ranks, gigabytes = map(int, re.search(r"^# For (\d+) GPUs? of (\d+) GB", recipe.read_text(), re.MULTILINE).groups())
    weights, config = ARCHITECTURES[hub_name(recipe)]
    (tmp_path / "config.json").write_text(json.dumps(config))
    main = importlib.import_module(f"training.{recipe.parent.parent.name}.main").main

    flags = [*flags_for(recipe, tmp_path), "--output_dir", str(tmp_path / "run")]
    flags += ["--device", "cuda", "--device_memory_gb", str(gigabytes)]
    assert main(["--config", str(recipe), *flags, "--dry_run", "true", "--num_ranks", str(ranks)]) is None

    said = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    if recipe.parent.parent.name != "step2_reward" and "lora" not in recipe.stem:
        assert f"{weights:,} weights" in said
    peaks = [float(found.replace(",", "")) for found in re.findall(r"most at once\S*.*?([\d,.]+) +\S+\n", said)]
    assert peaks and max(peaks) * 2**30 < 0.9 * gigabytes * 1e9  # a tenth for CUDA itself and torch's fragmentation
    assert max(peaks) * 2**30 > 0.02 * gigabytes * 1e9


def test_every_step_has_a_recipe_of_every_size():
    for step in ("step1_sft", "step2_reward", "step2_dpo", "step3_ppo"):
        assert {path.stem for path in RECIPES if path.parent.parent.name == step} >= set(SIZES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_a_recipe_says_how_it_is_run_and_where_its_numbers_come_from(recipe):
    text = recipe.read_text()
    assert str(recipe.relative_to(TRAINING.parent)) in text
    assert re.search(r"# .*\bet al\. 20\d\d", text)
