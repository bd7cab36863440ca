"""The course of an evaluated figure over a run: its best value, and whether further training made it worse. Numbers in,
sentences out; knows no step and no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from training.utils.run.metrics import greater_wins

# A run got worse if it lost more than both of these shares: of what its best had gained on the first, and of the best
# itself. Evaluations differ by less from one optimizer step to the next.
_PATIENCE = 3  # that is advised. Fewer steps are no advice: the learning rate would fall sooner, in another run
_OF_GAIN, _OF_BEST = 0.01, 0.02


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
        course = f"the held-out {self.name} was {word} {when(step)} ({value:.4g}) but is {last}"
        if step == 0:
            return f"{course}: training made it worse; lower the learning rate, or check the rows"
        return (
            f"{course}: further training made it worse; --load_best_model_at_end keeps the best model, and "
            f"--early_stopping {_PATIENCE} also ends training after {_PATIENCE} evaluations without improvement"
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
