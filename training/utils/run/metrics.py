"""Metrics of a run: metrics.jsonl and the trackers under the same names, and a progress bar. Rank 0 alone writes."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from training.utils.run.trackers import Tracker, open_trackers


class MetricsWriter:
    """Writes one JSON object a step to metrics.jsonl and tells the same numbers to trackers.

    A metric's name is the same in all, e.g. `train/loss`. A context manager: closing flushes. done_steps,
    done_seconds: where a resumed run goes on; its metrics.jsonl ends with that step. report_to: names of trackers.
    settings: those of the run, for them. One that fails later is said so and told no more: training goes on.
    """

    def __init__(
        self,
        output_dir: str | Path,
        is_main_rank: bool,
        done_steps: int = 0,
        done_seconds: float = 0.0,
        report_to: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._file = None
        self._trackers: list[Tracker] = []
        self._started = time.monotonic() - done_seconds
        if not is_main_rank:
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / "metrics.jsonl", "a" if done_steps else "w", encoding="utf-8")
        self._trackers = open_trackers(report_to, folder, settings or {}, done_steps)

    @property
    def seconds(self) -> float:
        """How long the run has gone on, in all its parts."""
        return time.monotonic() - self._started

    def flush(self) -> None:
        """Put everything on disk."""
        if self._file is not None:
            self._file.flush()
            self._tell(lambda tracker: tracker.flush())

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record `metrics` (plain numbers) at optimizer step `step`."""
        if self._file is None:
            return
        plain = {name: float(value) for name, value in metrics.items()}
        line: dict[str, Any] = {"step": step, "seconds": round(self.seconds, 3)}
        # JSON has no NaN: a number that is none is written as null, so that every line stays readable.
        line.update({name: value if math.isfinite(value) else None for name, value in plain.items()})
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._tell(lambda tracker: tracker.figures(step, plain))

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Tell the trackers of a few of `samples` (prompt, response, reward, ...). RunFolder keeps them all."""
        self._tell(lambda tracker: tracker.samples(step, samples))

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        ended_well = kind is None or (isinstance(problem, SystemExit) and not problem.code)
        self._tell(lambda tracker: tracker.close(ended_well))

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                what(tracker)
            except Exception as problem:  # noqa: BLE001 (a service out of reach must not end a run of days)
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                say(f"warning: {name} is told no more of this run ({type(problem).__name__}: {problem})")


def progress_bar(
    total: int, name: str, is_main_rank: bool, unit: str = "step", on_terminal_only: bool = False, done: int = 0
) -> tqdm:
    """A bar on rank 0's stderr: steps, the figures given to `show`, time left; silent elsewhere. Where stderr is no
    terminal there is no bar but a plain line at each tenth of the way, or nothing (`on_terminal_only`). done: where a
    resumed run goes on.
    """
    kind, often = (tqdm, 0.2) if sys.stderr.isatty() else (_Tenths, 0.0)
    return kind(
        total=total,
        initial=done,
        desc=name,
        unit=unit,
        disable=not is_main_rank or (on_terminal_only and not sys.stderr.isatty()),
        dynamic_ncols=True,
        mininterval=often,
    )


class _Tenths(tqdm):
    """A bar for logs: a line at each tenth of the way, at most ten of them, whatever else is asked."""

    _tenth = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        tenth = 10 * self.n // max(self.total, 1)
        if self._tenth == 0:  # where it begins, which a resumed run has behind it
            self._tenth = 10 * self.initial // max(self.total, 1)
        if tenth > self._tenth:
            self._tenth = tenth
            told = self.format_dict
            done, rate = self.n - self.initial, told["elapsed"] / max(self.n - self.initial, 1)
            left = (
                f", {tqdm.format_interval((self.total - self.n) * rate)} left" if done and self.n < self.total else ""
            )
            shown = f", {self.postfix}" if self.postfix else ""
            self.fp.write(f"{self.desc}: {self.unit} {self.n} of {self.total}{shown}{left}\n")
            self.fp.flush()
        return True

    def clear(self, nolock: bool = False) -> None:
        """Nothing: a line stays."""

    def close(self) -> None:
        self.disable = True  # tqdm's own would add an empty line


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
