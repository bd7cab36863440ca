"""Two ranks, of which the second runs out of memory inside a step. Started by test_leaving.py, with a case:

pending: the second has a collective under way that the first never joins, and the first waits in another one.
stuck: the first does not hear of anything, as a host that waits for its GPU in a collective of NCCL's.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from training.utils.engine.ranks import startup
from training.utils.engine.ranks.startup import started_process_group
from training.utils.engine.training_engine import memory_explained
from training.utils.run.program import run_program

startup._POLL_SECONDS, startup._GRACE_SECONDS, startup._LEAVE_SECONDS = 0.2, 1.0, 1.0


def main(argv: list[str]) -> None:
    with started_process_group(600.0) as ranks:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        dist.barrier()
        if ranks.rank == 0:
            if argv[-1] == "stuck":
                time.sleep(600)
            dist.all_reduce(torch.ones(4), group=groups[0])
            return
        dist.all_reduce(torch.ones(4), group=groups[1], async_op=True)
        with memory_explained("a step", ranks.rank, lambda: "one row"):
            time.sleep(0.5)
            raise MemoryError("a test's")


if __name__ == "__main__":
    run_program(main)
