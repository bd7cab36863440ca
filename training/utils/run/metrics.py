"""Metrics of a run: metrics.jsonl, and trackers under the same names. Rank 0 alone writes. Knows no tracker by name."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from training.utils.run.console import log
from training.utils.run.run_folder import METRICS


class Tracker(Protocol):
    """A place other than metrics.jsonl that receives a run's metrics, such as TensorBoard."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record plain numbers at a step."""

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record some of a step's samples, as text."""

    def flush(self) -> None:
        """Write everything to disk; nothing to do for trackers that write by themselves."""

    def close(self, ended_well: bool) -> None:
        """End the run."""


class MetricsWriter:
    """Writes one JSON object a step to metrics.jsonl and passes the same numbers to `trackers`.

    A context manager: closing flushes, and closes the trackers. A tracker that fails is dropped with a warning, and
    training continues. done_steps, done_seconds: where a resumed run continues; its metrics.jsonl ends with that step.
    """

    def __init__(
        self,
        output_dir: str | Path,
        is_main_rank: bool,
        done_steps: int = 0,
        done_seconds: float = 0.0,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.folder = Path(output_dir)
        self._file = None
        self.evaluation: dict[str, float] = {}  # the figures of the last evaluation, on the main rank
        self._trackers = list(trackers)
        self._started = time.monotonic() - done_seconds
        if is_main_rank:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.folder / METRICS, "a" if done_steps else "w", encoding="utf-8")

    @property
    def seconds(self) -> float:
        """How long the run has taken so far, including what came before each resume."""
        return time.monotonic() - self._started

    def flush(self) -> None:
        """Have the trackers write everything to disk; metrics.jsonl is there after every line."""
        self._each_tracker(lambda tracker: tracker.flush())

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record `metrics` (plain numbers) at optimizer step `step`."""
        if self._file is None:
            return
        plain = {name: float(value) for name, value in metrics.items()}
        self.evaluation = {name: value for name, value in plain.items() if name.startswith("eval")} or self.evaluation
        line: dict[str, Any] = {"step": step, "seconds": round(self.seconds, 3)}
        # JSON has no NaN or infinity: they are written as null, so that every line can be read.
        line.update({name: value if math.isfinite(value) else None for name, value in plain.items()})
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._each_tracker(lambda tracker: tracker.metrics(step, plain))

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Pass samples (prompt, response, reward, ...) to the trackers, which keep a few; RunFolder keeps them all."""
        self._each_tracker(lambda tracker: tracker.samples(step, samples))

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: object, problem: object, trace: object) -> None:
        if self._file is not None:
            self._file.close()
        ended_well = problem is None or (isinstance(problem, SystemExit) and not problem.code)
        self._each_tracker(lambda tracker: tracker.close(ended_well))

    def _each_tracker(self, action: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                action(tracker)
            except Exception as problem:  # noqa: BLE001 (an unreachable service must not end a run of days)
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                log(f"warning: {name} stops receiving this run's metrics ({type(problem).__name__}: {problem})")
