"""The core without plugins, and everything else without one of them: a folder of threestep/plugins can be deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import boundary, rooms
from tests.support.new_models import save_new_model
from tests.support.sources import modules
from threestep.command import CORE_COMMANDS, commands
from training.utils.plugins.registry import _with_their_needs, plugins

ROOT = Path(__file__).parents[2]
SOURCES = boundary.without_tests({**modules(ROOT / "training"), **modules(ROOT / "threestep")})
DATA = "--data_path embedded --max_train_rows 8 --max_eval_rows 2 --eval_interval 0 --dtype fp32 --max_train_steps 1"
OF_STEPS = {
    "sft": "--per_device_train_batch_size 2 --max_seq_len 48",
    "reward": "--per_device_train_batch_size 2 --max_seq_len 48",
    "dpo": "--per_device_train_batch_size 2 --max_seq_len 48",
    "grpo": "--per_device_generation_batch_size 2 --num_samples_per_prompt 2 --max_answer_seq_len 4 "
    "--max_prompt_seq_len 40 --reward length --reward_length_characters 12",
}


def left_without(gone: str) -> set[str]:
    """The plugins that are left where one is deleted: those that need it do nothing either."""
    return set(_with_their_needs({name: each for name, each in plugins().items() if name != gone}))


@pytest.mark.parametrize("gone", plugins())
def test_nothing_else_imports_a_plugin(gone):
    left = left_without(gone)
    sources = {name: text for name, text in SOURCES.items() if boundary.plugin_of(name) in {None, *left}}
    assert len(sources) < len(SOURCES)
    assert rooms.imports_find_what_they_name(sources) == []


def test_an_import_of_a_deleted_plugin_is_found():
    sources = {"training.x": "import threestep.plugins.attic", "threestep.plugins.__init__": ""}
    assert len(rooms.imports_find_what_they_name(sources)) == 1


def checkout_without(place: Path, gone: set[str]) -> Path:
    """Copy the packages without these plugins."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        of_plugins = gone if Path(folder) == ROOT / "threestep" / "plugins" else set()
        return {"__pycache__", "tests", *of_plugins} & set(names)

    for package in ("training", "threestep"):
        shutil.copytree(ROOT / package, place / package, ignore=ignored)
    return place


def told(place: Path, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "threestep", *map(str, words)], cwd=place,
        env={**os.environ, "PYTHONPATH": str(place), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_without(place: Path, gone: set[str], words: list[str]) -> None:
    """The list of commands, the help of these, and one step of each program that trains."""
    place = checkout_without(place, gone)
    listed = told(place, "--help")
    assert all((f"  {word} " in listed) == (word in words) for word in commands())
    for word in words:
        assert told(place, word, "--help").startswith("usage")
    save_new_model(place / "start", hidden_size=16, num_hidden_layers=1)
    for step, own in OF_STEPS.items():
        model = "--actor_model_name_or_path" if step == "grpo" else "--model_name_or_path"
        places = ["--output_dir", place / step, "--data_output_path", place / "cache"]
        told(place, step, model, place / "start", *places, *DATA.split(), *own.split())
        assert (place / step / "model" / "config.json").is_file()


def test_the_core_trains_without_plugins(tmp_path):
    check_without(tmp_path, set(plugins()), [*CORE_COMMANDS])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gone", plugins())
def test_everything_else_works_without_one_plugin(tmp_path, gone):
    left = left_without(gone)
    of_left = [word for name in left for word in plugins()[name].commands]
    check_without(tmp_path, {gone}, [*CORE_COMMANDS, *of_left])
