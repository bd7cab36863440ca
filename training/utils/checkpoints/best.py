"""The best evaluation of a run, by a metric of metrics.jsonl (--load_best_model_at_end), and the end of training before
its last step, by evaluations that get no better (--early_stopping_patience)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.checkpoints.records import check_keys, record_of
from training.utils.run.metrics import greater_wins, judged_metric


@dataclass(frozen=True)
class Best:
    """An evaluation after `step`: the metric's name and value."""

    step: int
    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.4g} after step {self.step:,}"


def metric_in(figures: Mapping[str, float], given: str | None, flag: str = "--load_best_model_at_end") -> str:
    """The metric's name in `figures`, those of an evaluation; `given` may be written as transformers does (eval_loss).
    flag: what needs it. ThreestepError if there is none."""
    if not figures:
        raise ThreestepError(
            f"{flag} goes by evaluations, and there are no evaluation rows; raise "
            "--eval_fraction, name data with evaluation rows, or leave it out"
        )
    metric = judged_metric(figures, given)
    if metric is not None:
        return metric
    if given is None:
        return sorted(figures)[0]
    plain = [name.removeprefix("eval/") for name in figures]
    raise ThreestepError(
        f"--metric_for_best_model expects one of {', '.join(sorted(plain))}, got '{given}'{nearest_names(given, plain)}"
    )


def is_better(value: float, best: Best | None, greater: bool) -> bool:
    """True if `value` is finite and better than `best`. greater: a greater value is better"""
    if not math.isfinite(value):
        return False
    return best is None or (value > best.value if greater else value < best.value)


FLAG = "--early_stopping"


@dataclass
class EarlyEnd:
    """patience: evaluations in a row without a better one that end training; 0: they never do
    metric, greater: as of `metric_in` and `greater_wins`
    best, waited: the best evaluation so far, and those since
    called: a callback ended training
    """

    patience: int
    metric: str | None
    greater: bool | None
    best: Best | None = None
    waited: int = 0
    called: bool = False

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Count an evaluation; of the one before training, only look for the metric. ThreestepError if it is not
        there."""
        if not self.patience:
            return
        metric = metric_in(figures, self.metric, FLAG)
        if step == 0:
            return
        if is_better(figures[metric], self.best, greater_wins(metric, self.greater)):
            self.best, self.waited = Best(step, metric, figures[metric]), 0
        else:
            self.waited += 1

    @property
    def reason(self) -> str | None:
        """Why training ends now; None if it goes on."""
        if self.called:
            return 'the callback returned "stop"'
        if not self.patience or self.waited < self.patience:
            return None
        since = "no finite value" if self.best is None else f"none better than {self.best}"
        return f"{since} in {self.waited} evaluations ({FLAG} {self.patience})"

    def state(self) -> dict[str, Any]:
        """Its part of a checkpoint."""
        return {"best": self.best and asdict(self.best), "waited": self.waited, "called": self.called}

    def load_state(self, saved: Mapping[str, Any], has_callback: bool) -> None:
        """Continue from `state`. has_callback: the resumed run has one; without it an earlier one's end is over"""
        check_keys(saved, ("best", "waited", "called"), "the early end")
        self.best = record_of(Best, saved["best"], "the best evaluation") if saved["best"] else None
        self.waited = int(saved["waited"])
        self.called = bool(saved["called"]) and has_callback
