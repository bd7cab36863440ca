"""Metrics of a run: metrics.jsonl, and trackers under the same names; and the figure of evaluations that a run is
judged by. Rank 0 alone writes. Knows no tracker by name."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log
from training.utils.run.run_folder import METRICS, RunLog

if TYPE_CHECKING:
    from training.utils.contracts.run import RunCourse
    from training.utils.contracts.trackers import Tracker


class MetricsWriter:
    """Write one JSON object per step to metrics.jsonl and pass the same numbers to `trackers`.

    A context manager: closing closes the trackers. A tracker that fails is dropped with a warning, and training
    continues; lines that the disk refuses wait (RunLog). done_steps, done_seconds: where a resumed run continues; its
    metrics.jsonl ends with that step. lines: metrics.jsonl, where somebody else settles it at the run's end. course:
    those who get the figures first, and may add some.
    """

    def __init__(
        self,
        output_dir: str | Path,
        is_main_rank: bool,
        done_steps: int = 0,
        done_seconds: float = 0.0,
        *,
        trackers: Sequence[Tracker] = (),
        lines: RunLog | None = None,
        course: Sequence[RunCourse] = (),
    ) -> None:
        self.folder = Path(output_dir)
        self._is_main_rank = is_main_rank
        self.evaluation: dict[str, float] = {}  # the figures of the last evaluation, on the main rank
        self._trackers = list(trackers)
        self._course = course
        self._last_step = done_steps
        self._dropped: dict[str, int] = {}  # trackers that failed, and the last step before
        self._started = time.monotonic() - done_seconds
        if is_main_rank:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / METRICS, "a" if done_steps else "w"):
                pass  # now, where a refusal costs nothing
        self._settles = lines is None
        self._lines = lines or RunLog(self.folder / METRICS)

    @property
    def seconds(self) -> float:
        """Duration of the run so far, including the time before each resume."""
        return time.monotonic() - self._started

    def flush(self) -> None:
        """Have the trackers write everything to disk; metrics.jsonl is there after every line."""
        self._each_tracker(lambda tracker: tracker.flush())

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` (plain numbers) at optimizer step `step`."""
        if not self._is_main_rank:
            return
        self._last_step = step
        plain = {name: float(value) for name, value in metrics.items()}
        for part in self._course:
            plain |= part.figures(step, plain)
        self.evaluation = {name: value for name, value in plain.items() if name.startswith("eval")} or self.evaluation
        line: dict[str, Any] = {"step": step, "seconds": round(self.seconds, 3)}
        # JSON has no NaN or infinity: they are written as null, so that every line can be read.
        line.update({name: value if math.isfinite(value) else None for name, value in plain.items()})
        self._lines.append([json.dumps(line)])
        self._each_tracker(lambda tracker: tracker.metrics(step, plain))

    def write_beside(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record further figures, if there are some, of the evaluation at `step`, whose own are written."""
        if not metrics:
            return
        before = self.evaluation
        self.write(step, metrics)
        self.evaluation = {**before, **self.evaluation}

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Pass samples (prompt, response, reward, ...) to the trackers, which keep a few; RunFolder keeps them all."""
        self._each_tracker(lambda tracker: tracker.samples(step, samples))

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: object, problem: object, trace: object) -> None:
        if self._settles:
            self._lines.settle()
        ended_well = problem is None or (isinstance(problem, SystemExit) and not problem.code)
        self._each_tracker(lambda tracker: tracker.close(ended_well))
        for name, step in self._dropped.items():
            log(f"warning: {name} lacks metrics from step {step:,} on; metrics.jsonl and the report have them")

    def _each_tracker(self, action: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                action(tracker)
            except Exception as problem:  # noqa: BLE001 (an unreachable service must not end a run of days)
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                self._dropped[name] = self._last_step
                log(f"warning: {name} no longer receives this run's metrics ({type(problem).__name__}: {problem})")


# What a run is judged by unless a flag names another, the first that it has.
JUDGED = ("eval/reward", "eval/loss")
_LESS_IS_BETTER = ("loss", "perplexity")


def greater_wins(metric: str, given: bool | None = None) -> bool:
    """True if a greater value of `metric` is better: as the flag says, otherwise unless it is a loss."""
    return not metric.endswith(_LESS_IS_BETTER) if given is None else given


def judged_metric(names: Collection[str], given: str | None) -> str | None:
    """The metric that a run is judged by, of an evaluation's `names`: the one that the flag gives, which may be written
    as transformers does (eval_loss); by default the first of `JUDGED`. None if it is not there."""
    if given is None:
        return next((name for name in JUDGED if name in names), None)
    spelled = (given, f"eval/{given}", f"eval/{given.removeprefix('eval_')}")
    return next((name for name in spelled if name in names), None)
