"""The end of training before its last step: by evaluations that get no better (--early_stopping), or as a callback of
the user's says. Knows no ranks: the main rank's counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from training.utils.checkpoints.best import Best, is_better, metric_in
from training.utils.checkpoints.records import check_keys, record_of
from training.utils.run.judged import greater_wins

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
