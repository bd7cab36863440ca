"""A rank that fails leaves within seconds, whatever it or another rank waits for, and takes the others with it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.forked_programs import end, start_python
from training.utils.run.launch import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]  # on a busy machine
PROGRAM = Path(__file__).with_name("leaving_program.py")


@pytest.mark.parametrize("case", ["pending", "stuck"])
def test_out_of_memory_on_one_rank_ends_the_other(tmp_path, case):
    """Nobody but the ranks themselves ends them: no launcher, and no time limit below ten minutes."""
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TMPDIR": str(tmp_path)}
    output = tmp_path / "output.txt"
    programs = [
        start_python([str(PROGRAM), case], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, output, output)
        for rank in range(2)
    ]
    deadline = time.monotonic() + 90  # of which the start takes most
    try:
        while any(program.poll() is None for program in programs) and time.monotonic() < deadline:
            time.sleep(0.02)
        codes = [program.poll() for program in programs]
    finally:
        for program in programs:
            end(program)
    said = output.read_text()
    assert codes == [1, 2], said
    assert said.startswith("error: out of memory on rank 1 in a step of one row: ") and said.count("\n") == 1, said
