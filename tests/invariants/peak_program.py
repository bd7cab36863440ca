"""By hand: runs a step's program and tells how many bytes of tensors lived at once, to stand beside its `--dry_run`.

    python -m tests.invariants.peak_program training.step1_sft.main --config ... --flags ...

Several ranks: THREESTEP_RANKS=2 python -m training.utils.run.launch tests.invariants.peak_program training...
Counted are allocations of tensors on the CPU from before the model is loaded (torch.profiler), not the process: Python,
libraries and free heap are left out, as the estimate leaves them out.
"""

from __future__ import annotations

import importlib
import os
import sys

import torch


def main() -> None:
    program = importlib.import_module(sys.argv[1]).main
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        program(sys.argv[2:])
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    print(
        f"rank {os.environ.get('RANK', '0')}: at most {most / 2**30:.3f} GiB of tensors, {len(events)} events",
        flush=True,
    )


if __name__ == "__main__":
    main()
