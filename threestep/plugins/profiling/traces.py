"""Profiler traces of single steps (`--profile_steps`), for Perfetto (ui.perfetto.dev), chrome://tracing and
TensorBoard's profiler plugin."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from training.utils.contracts.run import StepObserver

if TYPE_CHECKING:
    from pathlib import Path

    from training.utils.contracts.run import ObservedRun


class Traces(StepObserver):
    """steps: those to trace, counted as in metrics.jsonl. folder: for the files, one a step and rank."""

    def __init__(self, steps: Collection[int], folder: Path, rank: int) -> None:
        self._steps, self._folder, self._rank = steps, folder, rank

    def path(self, step: int) -> Path:
        """Return the file of a step's trace on this rank."""
        return self._folder / f"step{step}_rank{self._rank}.pt.trace.json.gz"

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """See `StepObserver.around`."""
        if number not in self._steps:
            yield
            return
        from torch.profiler import profile  # of all the machine's activities: CPU and GPU

        profiler = profile()
        profiler.start()
        try:
            yield
        finally:  # also if the loop ends with this step
            profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path(number)))


def traces_of(run: ObservedRun) -> Traces | None:
    """Return the traces of a run; None where no step is to be traced."""
    steps = run.settings["profile_steps"]
    return Traces(frozenset(steps), run.folder / "profile", run.ranks.rank) if steps else None
