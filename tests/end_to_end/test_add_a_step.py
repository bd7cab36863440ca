"""docs/add_a_step.md is followed to the letter: its two files make a step that trains, plans, reports and is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import TIMEOUT_SECONDS
from tests.support import pages
from tests.support.forked_programs import ON_CPU
from tests.support.json_lines import read_lines
from tests.support.new_models import save_new_model
from tests.support.pages import ROOT
from threestep.command import commands

pytestmark = pytest.mark.timeout(900)  # on a busy machine
MOST_LINES = 120


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    page = (ROOT / "docs" / "add_a_step.md").read_text()
    return {block.label: block.content for block in pages.blocks(page) if block.language == "python"}


@pytest.fixture(scope="module")
def checkout(place: Path, files: dict[str, str]) -> Path:
    """A copy of the package with the page's step in it, a tiny model, and a folder to run in."""
    folder = place / "with_hinge"
    for package in ("training", "threestep"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    (folder / "training" / "step2_hinge").mkdir()
    for name, content in files.items():
        (folder / "training" / "step2_hinge" / name).write_text(content)
    save_new_model(folder / "start", vocab_size=353, num_hidden_layers=1)
    return folder


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **ON_CPU, "THREESTEP_RANKS": "1", "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )


def test_two_files_are_enough(files):
    assert list(files) == ["__init__.py", "main.py"]
    assert sum(len(content.splitlines()) for content in files.values()) <= MOST_LINES


def test_help_loads_no_torch_and_a_dry_run_plans(checkout):
    program = "import sys; from training.step2_hinge.main import main\ntry: main(['--help'])\nfinally: "
    program += "print('torch' in sys.modules)"
    helped = python(checkout, "-c", program)
    assert helped.returncode == 0 and "--margin" in helped.stdout and helped.stdout.endswith("False\n"), helped.stderr
    flags = "--model_name_or_path start --data_path embedded --dry_run --output_dir planned".split()
    planned = python(checkout, "-m", "training.step2_hinge.main", *flags)
    assert planned.returncode == 0 and "most at once" in planned.stdout, planned.stderr
    assert not (checkout / "planned").exists()
    refused = python(checkout, "-m", "training.step2_hinge.main", *flags, "--margin", "-1")
    assert refused.returncode == 2 and "--margin expects 0 or more, got -1.0" in refused.stderr


@pytest.mark.skipif("all" not in commands(), reason="the plugin that runs steps from one file is not there")
def test_it_trains_and_all_steps_finds_it(checkout):
    shared = {"data_path": ["embedded"], "data_split": "1,1,0", "max_seq_len": 64, "dtype": "fp32"}
    shared |= {"max_train_rows": 400, "max_eval_rows": 60, "per_device_train_batch_size": 20}
    hinge = {"learning_rate": 5e-3, "num_train_epochs": 2}
    values = {"output_dir": "run", "model_name_or_path": "start", "seed": 3, "shared": shared}
    values |= {"step1_sft": {"max_train_steps": 1}, "step2_hinge": hinge}
    (checkout / "run.yaml").write_text(json.dumps(values))
    ran = python(checkout, "-m", "threestep", "all", "--config", "run.yaml")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = read_lines(checkout / "run/step2_hinge/metrics.jsonl")
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 40 and losses[0] == pytest.approx(1.0, abs=0.1)  # scores begin near 0
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    summary = json.loads((checkout / "run/summary.json").read_text())
    assert summary["hinge_accuracy"] == [line["eval/accuracy"] for line in lines if "eval/accuracy" in line][-1] > 0.6
    assert "| step 2: pair accuracy " in ran.stdout and "seconds_hinge" in summary
    report = (checkout / "run/report.html").read_text(encoding="utf-8")
    assert "Step 2: reward model with a hinge loss" in report and "share of pairs in the right order" in report
    assert (checkout / "run/step2_hinge/model/model.safetensors").exists()
