"""The best evaluation of a run, by a metric of metrics.jsonl (--load_best_model_at_end)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.run.judged import judged_metric


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
