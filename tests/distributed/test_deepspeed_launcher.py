"""DeepSpeed's own launcher, called as the scripts call it."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
told = {"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
pathlib.Path(sys.argv[1], os.environ["RANK"] + ".json").write_text(json.dumps(told))
sys.exit(5 if "--fail" in sys.argv and os.environ["RANK"] == "1" else 0)
"""


def start(tmp_path, monkeypatch, *flags):
    (tmp_path / "a_step.py").write_text(PROGRAM)
    monkeypatch.setenv("THREESTEP_RANKS", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the CPU, also where there are GPUs
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launch = [sys.executable, "-m", "training.utils.run.launch", "a_step"]
    command = [*launch, str(tmp_path), "--name", "two words", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_two_ranks_with_the_flags_as_given(tmp_path, monkeypatch):
    done = start(tmp_path, monkeypatch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("+ ") and "--num_accelerators 2" in done.stdout.splitlines()[0]
    for rank in (0, 1):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["argv"] == [str(tmp_path), "--name", "two words"]  # and no --local_rank
        assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert told["OMP_NUM_THREADS"] == "1"


def test_a_rank_that_fails_gives_the_exit_code(tmp_path, monkeypatch):
    assert start(tmp_path, monkeypatch, "--fail").returncode == 5
