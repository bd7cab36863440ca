"""Every command line of DeepSpeed-Chat's own scripts resolves: behind our script, by --dry_run, on small models."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import yaml

from tests.support.deepspeed_chat_lines import LINES, ScriptLine
from tests.support.tiny_models import tiny_config
from training.utils.run.launch import as_variables

PROGRAMS = {"sft": "step1_sft", "reward": "step2_reward", "dpo": "step2_dpo", "ppo": "step3_ppo"}
# A small configuration in the place of each model, by a part of its name.
FAMILIES = {"opt": "opt", "llama": "llama", "bloom": "bloom", "mgpt": "gpt2", "actor": "opt", "critic": "opt"}
LONG_ENOUGH = {"opt": "max_position_embeddings", "llama": "max_position_embeddings", "gpt2": "n_positions"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """By family, a folder with a configuration of it and nothing else."""
    place = tmp_path_factory.mktemp("models")
    for family in set(FAMILIES.values()):
        more = {LONG_ENOUGH[family]: 512} if family in LONG_ENOUGH else {}
        config = tiny_config(family, **more)
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(place / family)
    return {family: str(place / family) for family in set(FAMILIES.values())}


def words_of(line: ScriptLine, folders: dict[str, str]) -> list[str]:
    """Its flags, with a folder in the place of a model."""
    words = line.flags.split()
    for place, word in enumerate(words[:-1]):
        if word.endswith("model_name_or_path"):
            name = words[place + 1].lower()
            words[place + 1] = folders[next(family for part, family in FAMILIES.items() if part in name)]
    return words


def values_of(words: list[str]) -> dict[str, list[str]]:
    """By flag, the last values given to it."""
    found: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, found[word] = word, []
        else:
            found[flag].append(word)
    return {name.removeprefix("--"): values for name, values in found.items()}


def same(setting: Any, values: list[str]) -> bool:
    if isinstance(setting, list):
        return setting == values
    if isinstance(setting, bool):
        return setting and not values
    return setting == (type(setting)(values[0]))


def test_there_are_as_many_as_its_scripts_run():
    assert Counter(line.step for line in LINES) == {"sft": 20, "dpo": 9, "reward": 9, "ppo": 29}


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.step}-{line.name}")
def test_it_resolves_as_it_is(line, folders, tmp_path, capsys):
    words = words_of(line, folders)
    rest, variables, _ = as_variables([*line.launcher.split(), *words], {})
    assert rest == words and len(variables) == len([flag for flag in line.launcher.split() if "nodes" not in flag]) / 2
    main = importlib.import_module(f"training.{PROGRAMS[line.step]}.main").main
    main([*words, "--output_dir", str(tmp_path / "out"), "--dry_run"])
    said = capsys.readouterr().out
    assert not (tmp_path / "out").exists() and "most at once" in said
    settings = yaml.safe_load(said.split("settings:\n")[1].split("\n\n")[0])
    given = values_of(words)
    assert settings["data_path"] == given.get("data_path", ["Dahoas/rm-static"])
    if line.step == "ppo":  # rollouts of one minibatch are drawn together
        given["generation_batches"] = given.get("gradient_accumulation_steps", ["1"])
    wrong = {flag: (settings[flag], values) for flag, values in given.items() if flag in settings}
    assert {flag: both for flag, both in wrong.items() if not same(*both)} == {}
    unknown = {flag for flag in given if flag not in settings}
    assert all(f"--{flag} is not needed: " in said or f"--{flag} is read as " in said for flag in unknown)
