"""A profiler's trace of chosen steps (`--profile_steps`), which Perfetto (ui.perfetto.dev), chrome://tracing and
TensorBoard's profiler plugin open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = "profile"


@dataclass(frozen=True)
class Traces:
    """steps: those to trace, counted as in metrics.jsonl. folder: where the files go, one a step and rank."""

    steps: frozenset[int] = frozenset()
    folder: Path = Path(FOLDER)

    def path(self, step: int, rank: int) -> Path:
        return self.folder / f"step{step}_rank{rank}.pt.trace.json.gz"


NO_TRACES = Traces()


def traced(steps: Iterable[int], traces: Traces, rank: int) -> Iterator[int]:
    """The same steps; the profiler runs from where a chosen one is given until the next is asked for."""
    for step in steps:
        if step not in traces.steps:
            yield step
            continue
        from torch.profiler import profile  # all activities that this machine has: CPU and GPU

        profiler = profile()
        profiler.start()
        try:
            yield step
        finally:  # also where the loop ends with this step
            profiler.stop()
            traces.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(traces.path(step, rank)))
