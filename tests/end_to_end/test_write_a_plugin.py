"""docs/write_a_plugin.md is followed to the letter: the package is installed outside of the checkout, and all it adds
is used in one run."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.end_to_end.compared import same
from tests.end_to_end.conftest import MODULES, run_program
from tests.support import pages
from tests.support.forked_programs import FORKS_VARIABLE, ON_CPU
from tests.support.new_models import save_new_model
from tests.support.pages import ROOT

pytestmark = pytest.mark.timeout(900)  # on a busy machine
TINY = (
    "--max_train_rows 8 --max_eval_rows 2 --eval_interval 0 --dtype fp32 --max_train_steps 2 --max_answer_seq_len 6 "
    "--max_prompt_seq_len 40 --per_device_generation_batch_size 4 --num_samples_per_prompt 2"
)


@pytest.fixture(scope="module")
def installed(place: Path) -> Path:
    page = (ROOT / "docs" / "write_a_plugin.md").read_text()
    files = {block.label: block.content for block in pages.blocks(page) if block.label}
    modules = {f"{name}.py" for name in ("__init__", "engine", "loss", "optimizer", "tracker", "observer", "command")}
    assert {"terse/pyproject.toml", *modules} == files.keys()
    source = place / "source_of_terse"
    (source / "terse").mkdir(parents=True)
    for name, content in files.items():
        (source / (name.removeprefix("terse/") if "/" in name else f"terse/{name}")).write_text(content)
    target = place / "installed_terse"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return target


def threestep(installed: Path, place: Path, *words: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), str(ROOT)])
    command, environment = [sys.executable, "-m", "threestep", *map(str, words)], {**os.environ, **ON_CPU}
    environment["PYTHONPATH"] = path
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)


def test_all_that_the_page_adds_is_used(installed, place):
    save_new_model(place / "runs/sft/model", hidden_size=16, num_hidden_layers=1)
    page = (ROOT / "docs" / "write_a_plugin.md").read_text()
    line = next(block.content for block in pages.blocks(page) if block.content.startswith("threestep grpo"))
    ran = threestep(
        installed, place, *line.replace("\\\n", "").split()[1:], *TINY.split(), "--data_output_path", "cache"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = list(csv.reader((place / "runs/grpo/metrics.csv").open()))
    ended, drawn = ([float(value) for _, name, value in rows if name == f"terse/{each}"] for each in ("ended", "drawn"))
    assert drawn and all(0 <= some <= count for some, count in zip(ended, drawn, strict=True))
    steps = [list(map(int, line.split())) for line in (place / "runs/grpo/learnt_rows.txt").read_text().splitlines()]
    assert [step[:2] for step in steps] == [[1, 1]] and len(set(steps[0][2:])) == 8  # the data's prompts make one step
    told = threestep(installed, place, "terse", "runs/grpo")
    count = f"{ended[-1]:.0f} of {drawn[-1]:.0f}"
    assert told.stdout == f"runs/grpo: {count} responses finished in the last step\n", told.stderr


def test_they_stand_in_the_help_and_are_refused_without_the_package(installed, place):
    helped = threestep(installed, place, "ppo", "--help", "all").stdout
    assert all(name in helped for name in ("counted", "csv", "gentle", "sign_sgd"))
    assert "  terse " in threestep(installed, place, "--help").stdout
    refused = threestep(ROOT, place, "terse", "runs/grpo")
    assert refused.returncode == 2 and "there is no command 'terse'" in refused.stderr
    flags = ["--model_name_or_path", "m", "--data_path", "embedded", "--output_dir", "o", "--optimizer", "sign_sgd"]
    refused = threestep(ROOT, place, "sft", *flags)
    assert refused.returncode == 2 and "--optimizer expects one of adamw, got 'sign_sgd'" in refused.stderr


@pytest.mark.parametrize(("ranks", "cases"), [(1, ["0 bf16"]), (2, ["0 fp32", "2 bf16"])])
def test_its_optimizer_trains_and_resumes_to_the_bit(installed, place, monkeypatch, ranks, cases):
    """Each step moves a weight by the learning rate, and a run that was stopped ends as one that was not. cases: ZeRO
    stage and precision"""
    monkeypatch.setenv(FORKS_VARIABLE, "0")  # the package is on the path of new processes
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), str(ROOT)]))
    start, root = place / "start_of_signs", place / f"signs_{ranks}"
    if not start.exists():
        save_new_model(start, hidden_size=16, num_hidden_layers=1)
    root.mkdir()
    flags = [
        "--model_name_or_path", start, "--data_path", "embedded", "--data_output_path", place / "cache_of_signs",
        *"--max_train_rows 32 --max_eval_rows 2 --eval_interval 0 --max_seq_len 40 --max_train_steps 3".split(),
        *"--per_device_train_batch_size 2 --lr_scheduler_type constant --weight_decay 0 --save_at_end true".split(),
        *"--optimizer sign_sgd --learning_rate 0.001 --report_mfu false".split(),
    ]  # fmt: skip
    runs: list[tuple[str, list[object], Path]] = []
    for case in cases:
        stage, dtype = case.split()
        own = [*flags, "--zero_stage", stage, "--dtype", dtype]
        whole, stopped = root / f"{case} whole", root / f"{case} stopped"
        other = ["--resume", "--max_train_steps", 4, "--optimizer", "adamw"]
        runs += [(MODULES[1], own, whole), (MODULES[1], [*own, "--stop_before", "1s"], stopped)]
        runs += [(MODULES[1], [*own, "--resume"], stopped), (MODULES[1], [*own, *other], stopped)]
    ends = run_program(root, "runs", ranks, runs)
    for number, case in enumerate(cases):
        ran, paused, resumed, refused = ends[4 * number : 4 * number + 4]
        assert (ran, paused, resumed) == ("done", "exit 0", "done")
        assert "--optimizer was sign_sgd and is now adamw" in refused
        same(root / f"{case} whole", root / f"{case} stopped")
        after, before = (load_file(each / "model.safetensors") for each in (root / f"{case} whole" / "model", start))
        most = max(float((weight.float() - before[name].float()).abs().max()) for name, weight in after.items())
        assert most == pytest.approx(0.003, rel=1e-3 if "fp32" in case else 0.7)  # three steps of 0.001, rounded
        assert yaml.safe_load((root / f"{case} whole" / "config.yaml").read_text())["optimizer"] == "sign_sgd"
