"""One case in this environment, on one rank or more; imports torch.

    python -m torch.distributed.run --nproc_per_node 2 -m benchmarks.conformance.running ADAPTER CASE OUT

runs the case that a file holds, and leaves what each rank saw in OUT.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.conformance.seen import Seen, SftCase

SECONDS = 600


def run_case(adapter: Any, case: SftCase) -> Seen:
    """What the trainer did with the case, the rows of all ranks together."""
    if case.ranks == 1 or getattr(adapter, "STARTS_RANKS", False):
        seen = adapter.sft(case)
        if not seen.batches:
            raise NotImplementedError("no optimizer step was taken")
        return seen
    folder = Path(tempfile.mkdtemp())
    torch.save(case, folder / "case.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(case.ranks)]
    command += ["--master_port", str(29500 + os.getpid() % 1000), "-m", "benchmarks.conformance.running"]
    command += [adapter.__name__, str(folder / "case.pt"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return joined([torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(case.ranks)])


def joined(ranks: list[Seen]) -> Seen:
    """Gradients and weights of the first rank, and the micro-batches of all."""
    first = ranks[0]
    batches = [sum((rank.batches[step] for rank in ranks), []) for step in range(len(first.batches))]
    return Seen(batches, first.gradients, first.weights, first.losses)


def main() -> None:
    """Run one case on this rank."""
    name, case, out = sys.argv[1:]
    seen = import_module(name).sft(torch.load(case, weights_only=False))
    torch.save(seen, Path(out) / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
