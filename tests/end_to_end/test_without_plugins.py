"""The core without plugins, and everything else without one of them: a folder of threestep/plugins can be deleted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.conftest import save_start
from tests.support import boundary
from tests.support.forked_programs import ON_CPU, run_python
from tests.support.json_lines import write_lines
from tests.support.sorted_words import pair_rows
from tests.support.sources import modules
from threestep.command import CORE_COMMANDS
from training.utils.plugins.registry import _with_their_needs, plugins

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("checkout_program.py")
SOURCES = boundary.without_tests({**modules(ROOT / "training"), **modules(ROOT / "threestep")})
MODULES = [name.removesuffix(".__init__") for name in SOURCES if not name.endswith(".__main__")]
SHORT = "--max_train_rows 8 --max_eval_rows 2 --eval_interval 0 --dtype fp32 --max_train_steps 1"
OF_STEPS = {
    **dict.fromkeys(("sft", "reward", "dpo"), "--per_device_train_batch_size 2 --max_seq_len 48"),
    "grpo": "--per_device_generation_batch_size 2 --num_samples_per_prompt 2 --max_answer_seq_len 4 "
    "--max_prompt_seq_len 40 --reward length --reward_length_characters 12",
}


def left_without(gone: str) -> set[str]:
    """The plugins that are left where one is deleted: those that need it do nothing either."""
    return set(_with_their_needs({name: each for name, each in plugins().items() if name != gone}))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("checkout")
    for package in ("training", "threestep"):
        shutil.copytree(ROOT / package, place / package, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    save_start(place / "start")
    write_lines(place / "pairs.jsonl", pair_rows(40))
    return place


@contextmanager
def without(checkout: Path, gone: set[str]) -> Iterator[None]:
    """These plugins' folders are not there meanwhile."""
    folder, aside = checkout / "threestep" / "plugins", checkout / "aside"
    aside.mkdir(exist_ok=True)
    for name in gone:
        (folder / name).rename(aside / name)
    try:
        yield
    finally:
        for name in gone:
            (aside / name).rename(folder / name)


def check_without(checkout: Path, gone: set[str], left: set[str], place: Path) -> None:
    """Every module imports, every command has its help, and each program that trains makes one step."""
    kept = [name for name in MODULES if boundary.plugin_of(name) in {None, *left}]
    commands = [*CORE_COMMANDS, *(word for name in left for word in plugins()[name].commands)]
    data = ["--data_path", f"jsonl:{checkout / 'pairs.jsonl'}"]
    runs = []
    for step, own in OF_STEPS.items():
        model = "--actor_model_name_or_path" if step == "grpo" else "--model_name_or_path"
        places = ["--output_dir", place / step, "--data_output_path", place / "cache"]
        runs.append([step, model, checkout / "start", *places, *data, *SHORT.split(), *own.split()])
    told = [json.dumps(each, default=str) for each in (kept, commands, runs)]
    environment = {**os.environ, **ON_CPU, "PYTHONPATH": str(checkout)}
    with without(checkout, gone):
        done = run_python([str(PROGRAM), str(checkout), *told], environment, folder=place)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for step in OF_STEPS:
        assert (place / step / "model" / "config.json").is_file()


def test_the_core_works_without_plugins(checkout, tmp_path):
    check_without(checkout, set(plugins()), set(), tmp_path)


@pytest.mark.parametrize("gone", plugins())
def test_everything_else_works_without_one_plugin(checkout, tmp_path, gone):
    check_without(checkout, {gone}, left_without(gone), tmp_path)
