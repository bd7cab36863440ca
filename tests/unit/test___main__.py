"""The path on which a rank finds the package: not the current folder's modules first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.end_to_end.conftest import save_start
from tests.support.data_forms import write_jsonl
from tests.support.sorted_words import pair_rows
from training.__main__ import PACKAGE, ROOT, main, search_path


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        (["", "/lib", ROOT], ["/lib", ROOT]),  # -c
        (["/work", "/lib", ROOT], ["/lib", ROOT]),  # -m
        ([PACKAGE, "/lib", ROOT], ["/lib", ROOT]),  # the package's folder
        (["/work", "/lib"], [ROOT, "/lib"]),  # nothing is installed
        (["/lib", "/work", ROOT], ["/lib", "/work", ROOT]),  # -P, and the user's PYTHONPATH
        ([], [ROOT]),
    ],
)
def test_what_stays_on_the_path(path, kept):
    assert search_path(path, here="/work") == kept


def test_where_one_works_in_the_checkout_it_stays():
    assert search_path([ROOT, "/lib"], here=ROOT) == [ROOT, "/lib"]


@pytest.mark.parametrize("words", [[], ["--config", "x"]])
def test_a_module_is_expected_first(words):
    with pytest.raises(SystemExit, match="^error: no module given; pass one first, such as training.step1_sft.main$"):
        main(words)


@pytest.fixture
def shadows(tmp_path):
    """A folder with files named as Python's modules and installed ones."""
    for name in ("random", "queue", "types", "dataclasses", "signal", "socket", "logging", "torch", "numpy", "psutil"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of the user stands for the module')\n")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [["threestep", "sft"], ["training.step1_sft.main"], ["training", "training.step1_sft.main"]],
    ids=" ".join,
)
def test_files_of_the_user_stand_for_no_module_of_pythons(words, shadows):
    save_start(shadows / "start")
    write_jsonl(shadows / "pairs.jsonl", pair_rows(40))
    flags = "--model_name_or_path start --output_dir tiny --data_path jsonl:pairs.jsonl --data_output_path cache "
    flags += "--dtype fp32 --max_train_rows 4 --max_eval_rows 2 --per_device_train_batch_size 2 "
    flags += "--max_train_steps 1 --max_seq_len 48"
    done = subprocess.run(
        [sys.executable, "-m", *words, *flags.split()], cwd=shadows, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": ROOT, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (shadows / "tiny" / "model" / "config.json").exists()


def test_modules_of_the_user_are_found_behind_the_others(tmp_path):
    (tmp_path / "mine.py").write_text("import sys\nprint(sys.path[-1])\n")
    code = "import sys; sys.argv[0] = '-m'; import training, mine"  # as Python has it while it looks for a module
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "\n"  # the current folder, as `-c` has it
