"""Ctrl-C as a terminal, `timeout` or a batch system sends it: to a whole group, twice, to every process of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.conftest import save_start
from tests.support.forked_programs import ON_CPU

pytestmark = pytest.mark.timeout(600)


def stopped(folder: Path, rows: Path, ranks: int, everywhere: bool) -> str:
    """What a run prints that gets SIGINT twice after its first step, as one Ctrl-C: its group, or all processes."""
    flags = f"--data_path jsonl:{rows} --num_train_epochs 9999 --max_seq_len 100 --data_output_path {folder}/c"
    words = [
        "sft",
        "--model_name_or_path",
        save_start(folder / "start"),
        *flags.split(),
        "--output_dir",
        folder / "out",
    ]
    run = subprocess.Popen(
        [sys.executable, "-m", "threestep", *map(str, words), "--num_ranks", str(ranks)], text=True,
        env={**os.environ, **ON_CPU}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    printed: list[str] = []
    for line in run.stdout:
        printed.append(line)
        if "SFT: step 1 of" in line:
            for _ in range(2):
                if everywhere:
                    for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
                        process.send_signal(signal.SIGINT)
                else:
                    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(60) == 0, "".join(printed)
    return "".join(printed)


@pytest.mark.parametrize(
    ("ranks", "everywhere"), [(1, False), *(pytest.param(2, sent, marks=pytest.mark.long) for sent in (False, True))]
)
def test_one_ctrl_c_that_arrives_twice_is_the_graceful_one(tmp_path, pairs_file, ranks, everywhere):
    printed = stopped(tmp_path, pairs_file, ranks, everywhere)
    assert printed.count("SIGINT: finishing this step") == 1 and "stopped after step" in printed
    assert (tmp_path / "out" / "checkpoints" / "latest").exists() and "Traceback" not in printed
