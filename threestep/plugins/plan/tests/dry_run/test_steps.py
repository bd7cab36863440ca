"""Every recipe is parsed by its step's own program and resolved, its models are built on the meta device at their true
sizes, and what it is said to need fits into the GPUs that it names. Hub names are replaced by folders that hold a
configuration and nothing else."""

from __future__ import annotations

import importlib
import json
import re

import pytest
import yaml

from tests.support.recipes import ARCHITECTURES, RECIPES, TRAINING, flags_for, gpus_of, hub_name
from training.utils.base import user_files
from training.utils.data import registry
from training.utils.generation.table import ENGINES


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a recipe's --dataset_module registers is forgotten after it."""
    registry.registered_names()
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr(user_files, "_loaded", {})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_a_recipe_resolves_and_fits_the_gpus_it_names(recipe, tmp_path, capsys, monkeypatch):
    engine = yaml.safe_load(recipe.read_text()).get("rollout_engine", "hf")
    if engine not in ENGINES:
        pytest.skip(f"the rollout engine {engine} is of a plugin, which is not there")
    monkeypatch.chdir(TRAINING.parent)  # where a recipe names files of the project
    ranks, gigabytes = gpus_of(recipe)
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
