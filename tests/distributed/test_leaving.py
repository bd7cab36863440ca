"""A rank that fails leaves within seconds, whatever it or another rank waits for, and takes the others with it. Where
one rank works on large files the others are in no collective, which would give up after --rank_timeout; and DeepSpeed's
own process groups give up after it too."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.support.forked_programs import ON_CPU, end, start_python
from training.utils.run.launch import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine
LEAVING, WAITING = (Path(__file__).with_name(f"{name}_program.py") for name in ("leaving", "waiting"))


@pytest.mark.parametrize("case", ["pending", "stuck"])
def test_out_of_memory_on_one_rank_ends_the_other(tmp_path, case):
    """Nobody but the ranks themselves ends them: no launcher, and no time limit below ten minutes."""
    shared = {**os.environ, **ON_CPU}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TMPDIR": str(tmp_path)}
    output = tmp_path / "output.txt"
    programs = [
        start_python([str(LEAVING), case], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, output, output)
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


SLOW_STORE = """
import datetime, sys, time
from contextlib import suppress
import torch.distributed as dist
from tests.distributed.launch import report
from training.utils.engine.ranks import startup
from training.utils.engine.ranks.startup import started_process_group

def failed_rank(self):
    with suppress(RuntimeError):
        lasting.wait(["never"], datetime.timedelta(seconds=3))

class Slow:
    def __del__(self):
        time.sleep(3)

startup._POLL_SECONDS = 0.01
lasting = dist.TCPStore("127.0.0.1", 0, 1, True)  # the group's own would end with it
with started_process_group() as ranks:
    if ranks.rank == 0:
        startup.RankWatch.failed_rank = failed_rank
        sys.slow = Slow()  # the interpreter takes seconds to end
    time.sleep(2)
report({})
"""


@pytest.mark.long  # a fork ends without the interpreter's end
def test_a_rank_ends_well_while_its_watch_waits_for_the_store():
    """It aborted with code -6, `terminate called without an active exception`, on a busy machine."""
    run_ranks(SLOW_STORE)


@pytest.mark.needs_plugin("other_ranks")
def test_nobody_waits_in_a_collective_while_the_first_rank_works_on_files(tmp_path):
    for told in run_ranks(WAITING, 2, [tmp_path]):
        assert told == {"early": [], "said": "a disk is full", "limit": 901.0}


def test_a_first_rank_that_dies_at_its_work_is_missed_at_once():
    script = """
        import os
        import torch.distributed as dist
        from tests.distributed.launch import report
        from training.utils.engine.ranks.collectives import on_main
        from training.utils.run.program import is_lost_rank
        dist.init_process_group("gloo")
        dist.barrier()
        try:
            on_main(lambda: os._exit(0), dist.get_rank() == 0, patient=True)
        except Exception as problem:
            report({"lost": is_lost_rank(problem), "said": str(problem)})
        os._exit(0)
    """
    _, told = run_ranks(script, 2)
    assert told["lost"], told
