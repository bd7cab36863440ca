"""The course of an evaluated figure over a run: its best value, and whether further training made it worse. Numbers in,
sentences out; knows no step and no model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

# What a run is judged by unless --metric_for_best_model names another, the first that it has.
JUDGED = ("eval/reward", "eval/loss")
_LESS_IS_BETTER = ("loss", "perplexity")
# A run got worse if it lost more than both of these shares: of what its best had gained on the first, and of the best
# itself. Evaluations differ by less from one optimizer step to the next.
_PATIENCE = 3  # that is advised. Fewer steps are no advice: the learning rate would fall sooner, in another run
_OF_GAIN, _OF_BEST = 0.01, 0.02


def greater_wins(metric: str, given: bool | None = None) -> bool:
    """True if a greater value of `metric` is better: as the flag says, otherwise unless it is a loss."""
    return not metric.endswith(_LESS_IS_BETTER) if given is None else given


def judged_metric(names: Collection[str], given: str | None) -> str | None:
    """The metric that a run is judged by, of an evaluation's `names`: the one that the flag gives, which may be written
    as transformers does (eval_loss); by default the first of `JUDGED`. None if it is not there."""
    if given is None:
        return next((name for name in JUDGED if name in names), None)
    for name in (given, f"eval/{given}", f"eval/{given.removeprefix('eval_')}"):
        # Until November 2026 the best of k was named pass@k where all values were 0 or 1.
        for known in (name, name.replace("_pass@", "_best@")):
            if known in names:
                return known
    return None


def may_be_evaluated(given: str, declared: Sequence[str]) -> bool:
    """False for a metric that no evaluation of a step has. declared: as of `StepFigures.evaluates`"""
    name = given.removeprefix("eval/").removeprefix("eval_")
    return not declared or any(fnmatchcase(name, pattern) for pattern in declared)


@dataclass(frozen=True)
class Course:
    """A metric's evaluations. first, best, last: (step, value); step 0 is before training."""

    metric: str
    first: tuple[int, float]
    best: tuple[int, float]
    last: tuple[int, float]

    @property
    def name(self) -> str:
        return self.metric.rpartition("/")[2].replace("_", " ")

    def lost(self, error: float = 0.0) -> bool:
        """True if the last value is notably worse than the best. error: standard error of a gain."""
        gain, loss = (abs(one[1] - self.best[1]) for one in (self.first, self.last))
        return loss > max(_OF_GAIN * gain, _OF_BEST * abs(self.best[1]), 2 * error)

    def sentence(self, error: float = 0.0, meanwhile: str = "") -> str:
        """That further training made it worse, and what to do; "" if it did not. error: as in `lost`. meanwhile: what
        else happened since the best."""
        if not self.lost(error):
            return ""
        word = "greatest" if self.best[1] > self.last[1] else "lowest"
        step, value = self.best
        last = f"{self.last[1]:.4g} {when(self.last[0])}{f' ({meanwhile})' if meanwhile else ''}"
        course = f"the held-out {self.name} was {word} {when(step)} ({value:.4g}) and is {last}"
        if step == 0:
            return f"{course}: training made it worse; lower the learning rate, or look at the rows"
        return (
            f"{course}: further training made it worse; --load_best_model_at_end ends with the best one, "
            f"--early_stopping {_PATIENCE} also ends training after {_PATIENCE} evaluations without a better one"
        )


def course_of(
    metric: str, points: Sequence[tuple[float, float | None]], greater_is_better: bool | None = None
) -> Course | None:
    """The course of (step, value) in order; None without a finite value. Of equal ones, the first is the best."""
    known = [(int(step), value) for step, value in points if value is not None and math.isfinite(value)]
    if not known:
        return None
    sign = -1.0 if greater_wins(metric, greater_is_better) else 1.0
    return Course(metric, known[0], min(known, key=lambda point: sign * point[1]), known[-1])


def when(step: float) -> str:
    """The time of an evaluation in words."""
    return f"after step {step:,.0f}" if step else "before training"
