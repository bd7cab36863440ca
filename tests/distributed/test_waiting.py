"""Where one rank works on large files the others are in no collective, which would give up after --rank_timeout; and
DeepSpeed's own process groups give up after it too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine
PROGRAM = Path(__file__).with_name("waiting_program.py")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


@pytest.mark.needs_plugin("other_ranks")
def test_nobody_waits_in_a_collective_while_the_first_rank_works_on_files(tmp_path):
    for told in run_ranks(PROGRAM, 2, [tmp_path], environment=ENVIRONMENT):
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
    _, told = run_ranks(script, 2, environment=ENVIRONMENT)
    assert told["lost"], told
