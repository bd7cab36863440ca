"""By hand: runs a step's program and tells how many bytes of tensors lived at once, to stand beside its `--dry_run`.

    python -m tests.invariants.peak_program training.step1_sft.main --config ... --flags ...

Several ranks: THREESTEP_RANKS=2 python -m training.utils.run.launch tests.invariants.peak_program training...
Counted are allocations of tensors on the CPU from before the model is loaded (torch.profiler), not the process: Python,
libraries and free heap are left out, as the estimate leaves them out. The profiler sees no free in gloo's threads, so
that a collective's tensors are held here until gloo has let go of them.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = ("all_to_all_single", "all_reduce")


def main() -> None:
    program = importlib.import_module(sys.argv[1]).main
    for name in COLLECTIVES:
        setattr(dist, name, held_for_gloo(getattr(dist, name)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        program(sys.argv[2:])
    events = memory_events(profile)
    print(
        f"rank {os.environ.get('RANK', '0')}: at most {most_at_once(events) / 2**30:.3f} GiB of tensors, "
        f"{len(events)} events",
        flush=True,
    )


def memory_events(profile: Any) -> list[Any]:
    """Allocations and frees of tensors, in order."""
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    return sorted(events, key=lambda event: event.start_ns())


def most_at_once(events: Sequence[Any]) -> int:
    """Bytes that lived at once."""
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def held_for_gloo(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective whose caller's tensors outlive gloo's references to them."""

    def called(*args: Any, **kwargs: Any) -> Any:
        done = collective(*args, **kwargs)
        time.sleep(0.005)
        return done

    return called


if __name__ == "__main__":
    main()
