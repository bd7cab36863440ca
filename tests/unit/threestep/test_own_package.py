"""Our modules beside a `training` of the user's, each in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOLD = (
    "import importlib, threestep, sys\nfrom threestep.own_package import is_apart, loaded_name\n"
    "found = importlib.import_module(loaded_name('training.utils.base.errors')).ThreestepError.__module__\n"
    "print(is_apart(), loaded_name('training.step1_sft.main'), found, threestep.__version__)\n"
)
APART = "True threestep.training.step1_sft.main threestep.training.utils.base.errors"
PLAIN = "False training.step1_sft.main training.utils.base.errors"


def told(place, source=TOLD, **environment):
    (place / "program.py").write_text(source)
    # Behind the program's folder, as what is installed is.
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    ran = subprocess.run([sys.executable, str(place / "program.py")], env=variables, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("theirs", ["training.py", "training/__init__.py", "training/loop.py"])
def test_theirs_and_ours(theirs, tmp_path):
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).write_text("MINE = 'mine'\n")
    module = "training.loop" if theirs == "training/loop.py" else "training"
    said = told(tmp_path, f"{TOLD}import {module} as own\nprint(own.MINE)\n")
    assert said.startswith(APART) and said.endswith("\nmine\n")
    if module == "training":  # of a folder without __init__.py Python finds an installed package first
        assert told(tmp_path, f"import {module} as own\n{TOLD}print(own.MINE)\n") == said
    assert (
        told(
            tmp_path,
            f"import threestep, {module} as own\nfrom threestep.training.utils.contracts.trackers import Tracker\n",
        )
        == ""
    )


def test_without_a_module_of_theirs(tmp_path):
    assert told(tmp_path).startswith(PLAIN)
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "rows.jsonl").write_text("")  # a folder of data
    assert told(tmp_path).startswith(PLAIN)
    assert told(tmp_path, f"import training\n{TOLD}").startswith(PLAIN)


def test_another_name_of_the_same_modules(tmp_path):
    """Also for what is imported by it first."""
    source = (
        "from threestep.training.utils.contracts.trackers import Tracker\n"
        "import training.utils.contracts.trackers as plain, threestep.training as ours, training, sys\n"
        "assert plain.Tracker is Tracker and ours is training and training.utils.contracts.trackers is plain\n"
        "assert (plain.__name__, plain.__spec__.name) == ('training.utils.contracts.trackers',) * 2\n"
        "try:\n    import threestep.training.nothing\n"
        "except ModuleNotFoundError as missing:\n    print(missing)\n"
    )
    assert told(tmp_path, source) == "No module named 'threestep.training.nothing'\n"


def test_a_rank_of_a_program_that_keeps_apart(tmp_path):
    same = "assert threestep.ThreestepError.__module__ == found\n"  # imports torch, which the other programs do without
    assert told(tmp_path, TOLD + same, THREESTEP_APART="1").startswith(APART)


def test_every_program_runs_apart(tmp_path):
    """By its command: `python threestep --run MODULE`, as the launcher starts ranks."""
    (tmp_path / "training.py").write_text("raise SystemExit('not yours')\n")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "THREESTEP_APART": "1"}
    for module in ("training.step1_sft.main", "training.step2_dpo.main"):
        words = [sys.executable, str(ROOT / "threestep"), "--run", module, "--help"]
        ran = subprocess.run(words, env=variables, cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0 and f"usage: python -m {module} " in ran.stdout, ran.stdout[:300] + ran.stderr


UNTIL_TORCH = """
import os, sys

class Seen:
    def find_spec(name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Seen)
"""


@pytest.mark.parametrize(
    "program",
    [
        "training.utils.run.launch",
        "threestep.command",
        pytest.param("threestep.plugins.programs.all_steps", marks=pytest.mark.needs_plugin("programs")),
    ],
)
def test_waiting_threads_leave_the_cores_soon_unless_the_user_set_how_long_they_spin(program, tmp_path):
    source = f"{UNTIL_TORCH}import {program}, torch\n"
    assert told(tmp_path, source) == "4000\n"  # set before torch is imported, which reads it
    assert told(tmp_path, source, GOMP_SPINCOUNT="7") == "7\n"
