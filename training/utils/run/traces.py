"""Profiler traces of single steps (`--profile_steps`), for Perfetto (ui.perfetto.dev), chrome://tracing and
TensorBoard's profiler plugin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Traces:
    """steps: those to trace, counted as in metrics.jsonl. folder: for the files, one a step and rank."""

    steps: frozenset[int] = frozenset()
    folder: Path = Path()

    def path(self, step: int, rank: int) -> Path:
        return self.folder / f"step{step}_rank{rank}.pt.trace.json.gz"


def traced(steps: Iterable[int], traces: Traces, rank: int) -> Iterator[int]:
    """Yield the same steps; the profiler runs from where a step to trace is yielded until the next is requested."""
    for step in steps:
        if step not in traces.steps:
            yield step
            continue
        from torch.profiler import profile  # of all the machine's activities: CPU and GPU

        profiler = profile()
        profiler.start()
        try:
            yield step
        finally:  # also if the loop ends with this step
            profiler.stop()
            traces.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(traces.path(step, rank)))
