"""Metrics of a run: metrics.jsonl and TensorBoard under the same names, and a progress bar. Rank 0 alone writes."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm


class MetricsWriter:
    """Writes one JSON object a step to metrics.jsonl and the same numbers to TensorBoard.

    A metric's name is the same in both, e.g. `train/loss`. A context manager: closing flushes both. done_steps,
    done_seconds: where a resumed run goes on; its metrics.jsonl ends with that step.
    """

    def __init__(
        self, output_dir: str | Path, is_main_rank: bool, done_steps: int = 0, done_seconds: float = 0.0
    ) -> None:
        self._file = None
        self._board = None
        self._started = time.monotonic() - done_seconds
        if not is_main_rank:
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        from torch.utils.tensorboard import SummaryWriter

        if not done_steps:
            for stale in (folder / "tensorboard").glob("events.out.tfevents.*"):
                stale.unlink()  # this run's curves replace those of an earlier run in the same folder
        self._file = open(folder / "metrics.jsonl", "a" if done_steps else "w", encoding="utf-8")
        # TensorBoard hides what the earlier part of the run told of steps from purge_step on.
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done_steps + 1 if done_steps else None)

    @property
    def seconds(self) -> float:
        """How long the run has gone on, in all its parts."""
        return time.monotonic() - self._started

    def flush(self) -> None:
        """Put everything on disk."""
        if self._file is not None and self._board is not None:
            self._file.flush()
            self._board.flush()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record `metrics` (plain numbers) at optimizer step `step`."""
        if self._file is None or self._board is None:
            return
        plain = {name: float(value) for name, value in metrics.items()}
        line: dict[str, Any] = {"step": step, "seconds": round(self.seconds, 3)}
        # JSON has no NaN: a number that is none is written as null, so that every line stays readable.
        line.update({name: value if math.isfinite(value) else None for name, value in plain.items()})
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in plain.items():
            self._board.add_scalar(name, value, step)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def progress_bar(
    total: int, name: str, is_main_rank: bool, unit: str = "step", on_terminal_only: bool = False, done: int = 0
) -> tqdm:
    """A bar on rank 0's stderr; silent elsewhere. Where stderr is no terminal it is drawn every 10 seconds, or not at
    all (`on_terminal_only`). done: where a resumed run goes on.
    """
    return tqdm(
        total=total,
        initial=done,
        desc=name,
        unit=unit,
        disable=not is_main_rank or (on_terminal_only and not sys.stderr.isatty()),
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
    )


def show(bar: tqdm, figures: str) -> None:
    """Count one step done and show `figures` at the end of the bar."""
    bar.set_postfix_str(figures, refresh=False)
    bar.update()


def say(sentence: str, is_main_rank: bool = True) -> None:
    """Print one line of a run's story on rank 0, beside the progress bar."""
    if not is_main_rank:
        return
    if sys.stderr.isatty():
        tqdm.write(sentence, file=sys.stdout)  # moves a bar that is open out of the way, and draws it again
    else:
        sys.stdout.write(sentence + "\n")
    sys.stdout.flush()
