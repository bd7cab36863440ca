"""Step 3's reward beside what nothing trains on: the account of a run's samples, and the curve against the KL."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from threestep.plugins.report.figures.charts import ChartLine, LineChart
from threestep.plugins.report.gaming.account import GamingAccount, account_of
from threestep.plugins.report.gaming.sentences import signs_of_gaming
from threestep.plugins.report.gaming.values import label_of, values_of

if TYPE_CHECKING:
    from threestep.plugins.report.figures.reading import StepRun

_DEFAULT = "model:1.0"  # --reward of a run whose config.yaml lacks it
_FEWEST = 3  # evaluations of a curve; the table has the first and the last


@dataclass(frozen=True)
class GamingFigures:
    """Figures of a run whose reward may be gamed. curve: None of fewer than three evaluations. kl: of the last weights
    from the reference, in nats a response; None without a reference."""

    run: str
    account: GamingAccount
    signs: tuple[str, ...]
    curve: LineChart | None
    kl: float | None


def gaming_of(step: StepRun) -> GamingFigures | None:
    """Return the figures of a step whose samples have rewards at two evaluations; None for others."""
    if len(step.samples) < 2:
        return None
    checker = step.settings.get("checker")
    values = values_of(str(step.settings.get("reward") or _DEFAULT), str(checker) if checker else None)
    account = account_of(step.samples[0][1], step.samples[1][1], values)
    if account is None:
        return None
    courses = {drift.name: _course(step, drift.name) for drift in account.drifts}
    kl = _kl_at(step)
    last = max((at for at, _ in courses[account.score.name]), default=0)
    signs = signs_of_gaming(account, courses)
    return GamingFigures(step.run, account, tuple(signs), _curve(account, courses, kl), kl.get(last))


def _course(step: StepRun, name: str) -> list[tuple[int, float]]:
    """(step, mean) of each evaluation that has a finite one."""
    return [(int(at), value) for at, value in step.points(f"eval/{name}") if value is not None]


def _kl_at(step: StepRun) -> dict[int, float]:
    """The KL of the weights after a step, by step: the next rollout's, which they drew; after the last rollout, that
    one's, which is of the weights one step before."""
    rollouts = sorted((int(at), value) for at, value in step.points("rollout/kl") if value is not None)
    steps = [at for at, _ in rollouts]
    found = {}
    for at in {int(at) for at, _ in step.points("eval/reward")} if rollouts else ():
        place = min(bisect.bisect_right(steps, at), len(rollouts) - 1)
        found[at] = max(rollouts[place][1], 0.0)  # an estimate of a small one may be below 0
    return found


def _curve(
    account: GamingAccount, courses: dict[str, list[tuple[int, float]]], kl: dict[int, float]
) -> LineChart | None:
    """Changes since the first evaluation against the square root of the KL (Gao et al. 2023), or the step without a
    reference."""
    lines = []
    for place, drift in enumerate(account.drifts):
        course = courses[drift.name]
        if len(course) < _FEWEST or not drift.deviation:
            continue
        points = [
            (math.sqrt(kl.get(at, 0.0)) if kl else float(at), (value - course[0][1]) / drift.deviation)
            for at, value in course
        ]
        label = f"{label_of(drift.name)}{'' if drift.is_trained else ', held out'}"
        lines.append(ChartLine(label, _ascending(points), place, is_evaluation=not drift.is_trained))
    if not lines:
        return None
    return LineChart(
        "Score and held-out values against the KL" if kl else "Score and held-out values",
        tuple(lines),
        "change since the first evaluation, in standard deviations of one response's value",
        "square root of the KL to the reference" if kl else "step",
    )


def _ascending(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted(points, key=lambda point: point[0]))
