"""The same two ranks by DeepSpeed's launcher, by torchrun as two nodes, and by accelerate launch: the losses of two
ranks that the tests start themselves. DeepSpeed's launcher is in every run in tests/end_to_end/ too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from tests.support.forked_programs import ON_CPU, ROOT, run_python
from tests.support.json_lines import read_lines
from tests.support.new_models import save_new_model
from training.utils.run.launch import free_port

STEP = "training.step1_sft.main"
FLAGS = (
    "--model_name_or_path model --data_path embedded --data_split 1,0,0 --max_train_rows 128 --max_eval_rows 16 "
    "--max_seq_len 64 --per_device_train_batch_size 16 --learning_rate 1e-3 --dtype fp32 --zero_stage 1 --seed 1 "
    "--data_output_path cache --no_report_mfu"
).split()
PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run"]
# On a CPU too: with --cpu, accelerate 1.15 starts one rank (seen), and with --multi_gpu as many as asked.
ACCELERATE = [*PYTHON, "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("launchers")
    save_new_model(path / "model")
    return path


def environment():
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("THREESTEP_", "MASTER_"))}
    return {**kept, **ON_CPU, "THREESTEP_RANKS": "2"}


def run(path, *commands):
    """Run the commands at the same time; all must end well."""
    started = [
        subprocess.Popen(
            command, cwd=path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    for process in started:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said


def losses(path):
    return [
        row[name] for row in read_lines(path / "metrics.jsonl") for name in ("train/loss", "eval/loss") if name in row
    ]


@pytest.fixture(scope="module")
def expected(folder):
    ran = run_python(["-m", STEP, *FLAGS, "--output_dir", "ours"], environment(), ranks=2, folder=folder)
    assert ran.returncode == 0, ran.stderr
    found = losses(folder / "ours")
    assert len(found) == 4 + 5  # 128 rows, 32 a step; evaluated before the first step and after each
    return found


@pytest.mark.long
def test_deepspeed_on_one_node(folder, expected):
    run(folder, [*PYTHON, "training.utils.run.launch", STEP, *FLAGS, "--output_dir", "deepspeed"])
    assert losses(folder / "deepspeed") == expected


def test_torchrun_on_two_nodes(folder, expected):
    where = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    step = ["-m", STEP, *FLAGS, "--output_dir", "torchrun"]
    run(folder, *([*TORCHRUN, *where, "--node_rank", rank, *step] for rank in "01"))
    assert losses(folder / "torchrun") == expected


@pytest.mark.long
def test_accelerate_launch(folder, expected):
    port = ["--main_process_port", str(free_port()), "--mixed_precision", "no", "--dynamo_backend", "no"]
    run(folder, [*ACCELERATE, *port, "-m", STEP, *FLAGS, "--output_dir", "accelerate"])
    assert losses(folder / "accelerate") == expected


TELLS = """
import json, os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
told = {"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
pathlib.Path(sys.argv[1], os.environ["RANK"] + ".json").write_text(json.dumps(told))
sys.exit(5 if "--fail" in sys.argv and os.environ["RANK"] == "1" else 0)
"""


def started(folder, *flags):
    (folder / "a_step.py").write_text(TELLS)
    command = [*PYTHON, "training.utils.run.launch", "a_step", str(folder), "--name", "two words", *flags]
    variables = {**environment(), "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def test_deepspeed_starts_two_ranks_with_the_flags_as_given(tmp_path):
    done = started(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("+ ") and "--num_accelerators 2" in done.stdout.splitlines()[0]
    for rank in (0, 1):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["argv"] == [str(tmp_path), "--name", "two words"]  # and no --local_rank
        assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert told["OMP_NUM_THREADS"] == "1"
    assert started(tmp_path, "--fail").returncode == 5  # of the rank that fails


# What a rank says of the other's end, by how that came about.
SAID = {
    "raise": "error on rank 1 (the first of the run):",
    "kill": "error: rank 0 lost another rank, which ended without an error message",
}


@pytest.mark.long
@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.parametrize("fault", list(SAID))
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_rank_that_fails_ends_the_run_with_its_error(folder, expected, launcher, fault):
    """The launchers end the other rank by a signal, which must not read as a wish to stop after the step."""
    port = str(free_port())
    start = {
        "torchrun": [*TORCHRUN, "--nnodes", "1", "--nproc_per_node", "2", "--master_port", port],
        "accelerate": [*ACCELERATE, "--main_process_port", port, "--mixed_precision", "no", "--dynamo_backend", "no"],
    }[launcher]
    out = f"{launcher}_{fault}"
    program = ["-m", "tests.end_to_end.fault_program", fault, "1", STEP, *FLAGS, "--output_dir", out]
    ran = subprocess.run([*start, *program], cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    seconds = time.time() - (folder / out / "metrics.jsonl").stat().st_mtime
    said = ran.stdout + ran.stderr
    assert ran.returncode != 0 and seconds < 30, said
    assert said.count(SAID[fault]) == 1 and said.count("error on rank 0") == 0, said
    assert not (folder / out / "checkpoints").exists()
