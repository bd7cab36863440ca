"""The best evaluation of a run, by a metric of metrics.jsonl (--load_best_model_at_end), and the end of training before
its last step, by evaluations that get no better (--early_stopping)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.checkpoints.folder import record_of
from training.utils.contracts.run import FinalWeights, RunCourse
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
            f"{flag} needs evaluations, but there are no evaluation rows; raise --eval_fraction, use data with "
            f"evaluation rows, or remove {flag}"
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


def open_course(settings: Mapping[str, Any]) -> RunCourse | None:
    """Return what judges a run by its evaluations; None where no flag asks for it."""
    asks = settings["load_best_model_at_end"] or settings["early_stopping"]
    return JudgedCourse(settings) if asks else None


class JudgedCourse(RunCourse):
    """Has a checkpoint written after each evaluation that is the best so far, and kept for the end of the run
    (--load_best_model_at_end); ends training after --early_stopping evaluations in a row without a better one."""

    judges = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._loads_best: bool = settings["load_best_model_at_end"]
        self._patience: int = settings["early_stopping"]
        self._metric, self._greater = settings["metric_for_best_model"], settings["greater_is_better"]
        self.keeps = int(self._loads_best)
        self._best: Best | None = None  # of all evaluations
        self._waited = 0  # evaluations since
        self._kept: Best | None = None  # whose checkpoint there is
        self._better: Best | None = None  # one that has none yet
        self._evaluations = 0
        self._is_resumed = False

    def resumed(self, state: Mapping[str, Any]) -> None:
        self._is_resumed = True
        self._kept = _best_in(state.get("best"))
        if self._patience and (early_end := state.get("early_end")):
            self._best, self._waited = _best_in(early_end["best"]), int(early_end["waited"])

    def evaluated(self, step: int, figures: Mapping[str, float]) -> bool:
        flag = "--early_stopping" if self._patience else "--load_best_model_at_end"
        metric = metric_in(figures, self._metric, flag)
        if step == 0:
            return False
        found, greater = Best(step, metric, figures[metric]), greater_wins(metric, self._greater)
        self._evaluations += 1
        if is_better(found.value, self._best, greater):
            self._best, self._waited = found, 0
        else:
            self._waited += 1
        self._better = found if self._loads_best and is_better(found.value, self._kept, greater) else None
        return self._better is not None

    def end_reason(self) -> str | None:
        if not self._patience or self._waited < self._patience:
            return None
        since = "no finite value" if self._best is None else f"none better than {self._best}"
        return f"{since} in {self._waited} evaluations (--early_stopping {self._patience})"

    def _kept_at(self, step: int) -> Best | None:
        return self._better if self._better is not None and self._better.step == step else self._kept

    def kept(self, step: int) -> int | None:
        kept = self._kept_at(step)
        return None if kept is None else kept.step

    def state(self, step: int) -> dict[str, Any]:
        kept = self._kept_at(step)
        early_end = {"best": self._best and asdict(self._best), "waited": self._waited}
        return {"best": kept and asdict(kept), **({"early_end": early_end} if self._patience else {})}

    def saved(self, step: int) -> None:
        self._kept, self._better = self._kept_at(step), None

    def final(self, step: int) -> FinalWeights | None:
        if not self._loads_best or step == 0:
            return None
        if self._evaluations == 1 and not self._is_resumed:
            log(
                "warning: --load_best_model_at_end had only one evaluation to choose from, at the end of the run; "
                "evaluate more often with --eval_interval or --eval_epochs"
            )
        best = self._better or self._kept
        return (
            None
            if best is None or best.step == step
            else FinalWeights(best.step, f"the best by its evaluations, {best}")
        )


def _best_in(saved: Any) -> Best | None:
    return record_of(Best, saved, "the best evaluation") if saved else None
