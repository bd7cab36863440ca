"""The house keeps its rules, and each rule finds what it forbids (a violation is planted for every one)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import house

ROOT = Path(__file__).parents[1]
MODULES = house.modules(ROOT / "training")
PROGRAMS = sorted(
    name
    for name, source in MODULES.items()
    if "run_program(" in source and '__name__ == "__main__"' in source and name != "training.utils.run.launch"
)

# rule, module, source that breaks it, source that does not
PLANTED = [
    (house.rooms_look_down, "training.utils.data.cache", "import training.step1_sft.loss", "import torch"),
    (
        house.rooms_look_down,
        "training.utils.data.cache",
        "def f():\n    from training.utils import engine",
        "from training.utils.run.errors import ThreestepError",
    ),
    (house.rooms_look_down, "training.utils.run.seeds", "from ..layout import rows", "from . import errors"),
    (house.rooms_look_down, "training.utils.layout.rows", "import training.utils.models", "import torch"),
    (
        house.steps_keep_apart,
        "training.step3_ppo.trainer",
        "from training.step1_sft import loss",
        "from training.step3_ppo import losses",
    ),
    (house.steps_keep_apart, "training.step2_dpo.loss", "from ..step2_reward import loss", "from . import x"),
    (
        house.step_parts_look_down,
        "training.step3_ppo.experience",
        "from training.step3_ppo.trainer import Trainer",
        "from training.step3_ppo.losses import policy_loss",
    ),
    (
        house.step_parts_look_down,
        "training.step3_ppo.trainer",
        "from training.step3_ppo import main",
        "from training.step3_ppo import records",
    ),
    (
        house.nobody_imports_a_program,
        "training.step1_sft.main",
        "from training.new_model import build",
        "from training import __version__",
    ),
    (
        house.third_parties_stay_home,
        "training.step1_sft.trainer",
        "def f():\n    import deepspeed.comm",
        "import transformers",
    ),
    (house.third_parties_stay_home, "training.step3_ppo.rollout.hf", "from vllm import LLM", "import torch"),
    (
        house.maths_needs_torch_alone,
        "training.step3_ppo.advantages.gae",
        "from transformers import AutoModel",
        "import math\nimport torch.nn.functional as F",
    ),
    (
        house.maths_needs_torch_alone,
        "training.step3_ppo.losses",
        "import numpy as np",
        "from training.utils.layout.rows import TokenRows",
    ),
    (
        house.maths_needs_torch_alone,
        "training.utils.layout.planner",
        "from training.utils.data.phases import SentenceRow",
        "import numpy as np",
    ),
    (house.maths_needs_torch_alone, "training.step1_sft.loss", "import tqdm", "from torch import nn"),
    (house.no_pickles, "training.utils.data.cache", "import pickle", "import pyarrow"),
    (
        house.no_pickles,
        "training.utils.models.loading",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=True)",
    ),
    (house.no_pickles, "training.x", "np.load('x', allow_pickle=True)", "np.load('x', allow_pickle=False)"),
    (house.no_bags, "training.step3_ppo.utils", "", ""),
    (house.no_bags, "training.utils.data.helpers", "", ""),
    (house.no_bags, "training.utils.__init__", "def f(): ...", '"""Rooms."""'),
    (house.opens_with_a_docstring, "training.x", "import os", '"""What it is."""\nimport os'),
    (house.no_prints, "training.step1_sft.trainer", "print('loss')", "log('loss')"),
    (house.no_bare_except, "training.x", "try: f()\nexcept: pass", "try: f()\nexcept OSError: pass"),
    (
        house.functions_stay_short,
        "training.x",
        "def f():\n" + "    g()\n" * house.LONGEST_FUNCTION_LINES,
        "def f():\n" + "    g()\n" * (house.LONGEST_FUNCTION_LINES - 1),
    ),
    (
        house.masks_come_from_lengths,
        "training.x",
        "mask = batch.input_ids_NT != tokenizer.pad_token_id",
        "same = tokenizer.pad_token_id == tokenizer.eos_token_id",
    ),
]


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule):
    problems = [problem for module, source in MODULES.items() for problem in rule(module, source)]
    assert not problems, "\n".join([rule.__doc__ or rule.__name__, *problems])


@pytest.mark.parametrize(
    ("rule", "module", "broken", "kept"), PLANTED, ids=[f"{row[0].__name__}-{row[1]}" for row in PLANTED]
)
def test_a_planted_violation_is_found(rule, module, broken, kept):
    assert len(rule(module, broken)) == 1
    if broken != kept:
        assert rule(module, kept) == []


def test_every_rule_has_a_violation_planted():
    assert {row[0] for row in PLANTED} == set(house.RULES)


def test_small_programs_may_print():
    assert house.no_prints("training.new_model", "print('x')") == []
    assert house.no_prints("training.utils.run.launch", "print('x')") == []


def test_an_import_for_type_checkers_is_not_eager():
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING: import torch\ndef f(): import numpy"
    eager = {found.module: found.eager for found in house.imports("training.x", source)}
    assert eager["typing"] and not eager["torch"] and not eager["numpy"]


def test_the_unit_tests_mirror_the_package():
    problems = house.unmirrored(ROOT / "tests" / "unit", ROOT / "training")
    assert not problems, "\n".join(problems)


def test_a_test_out_of_place_and_an_untested_room_are_found(tmp_path):
    for name in ("training/a/one.py", "training/b/two.py", "unit/a/test_one.py", "unit/a/test_one_more.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "unit/a/test_three.py").write_text("")
    problems = house.unmirrored(tmp_path / "unit", tmp_path / "training")
    assert problems == [
        "a/test_three.py tests no module of training/a",
        "training/b has no test in tests/unit",
    ]


def heavy_modules_after(code: str) -> tuple[list[str], float, str]:
    """Run `code` in a fresh Python; return the heavy packages it imported, its CPU seconds, its output."""
    tail = """
import resource, sys
heavy = ("torch", "deepspeed", "datasets", "pyarrow", "pandas", "peft", "accelerate", "tensorboard", "vllm")
usage = resource.getrusage(resource.RUSAGE_SELF)
print("\\nHEAVY", usage.ru_utime + usage.ru_stime, *[name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code + tail], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    said, _, figures = done.stdout.rpartition("HEAVY ")
    seconds, *heavy = figures.split()
    return heavy, float(seconds), said


def test_importing_the_package_is_cheap():
    heavy, seconds, _ = heavy_modules_after("import training")
    assert heavy == []
    assert seconds < 1


def test_a_heavy_import_is_seen():
    assert heavy_modules_after("import torch")[0] == ["torch"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_quick_and_loads_nothing_heavy(program):
    heavy, seconds, said = heavy_modules_after(
        f"""
import runpy, sys
sys.argv = ["main", "--help"]
try:
    runpy.run_module("{program}", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
"""
    )
    assert any(flag in said for flag in ("--config", "--out", "--part", "--data_output_path"))
    assert heavy == []
    assert seconds < 4  # of CPU; a second or two on a machine with nothing else to do
