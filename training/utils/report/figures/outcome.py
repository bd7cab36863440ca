"""What came out of a step: the evaluation that was best, the one that the model is of, and whether it got worse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from training.utils.report.figures.numbers import shown
from training.utils.report.figures.reading import finite
from training.utils.run.course import JUDGED, Course, course_of, when

if TYPE_CHECKING:
    from training.utils.report.figures.reading import StepRun

_FEWEST = 3  # evaluations that have a best one: of two, both are shown


@dataclass(frozen=True)
class HeadlineFigure:
    """A headline metric before and after training; after: None if there was one evaluation. error: standard error of
    the gain. note: what the best evaluation has, if that is not the last one."""

    title: str
    before: float | None
    after: float | None
    error: float | None = None
    note: str = ""
    got_worse: bool = False


def judged_course(step: StepRun) -> Course | None:
    """The course of what the run is judged by (--metric_for_best_model): its last value is that of the model."""
    metric = _judged_metric(step)
    if metric is None:
        return None
    greater, points = step.settings.get("greater_is_better"), step.points(metric)
    course = course_of(metric, points, greater if isinstance(greater, bool) else None)
    if course is None or not (step.settings.get("load_best_model_at_end") and step.summary):
        return course
    trained = course_of(metric, [point for point in points if point[0]], greater)
    return course if trained is None else replace(course, last=trained.best)


def worse_sentence(step: StepRun) -> str:
    """The sentence of a run that training on made worse; "" for others."""
    course = judged_course(step)
    return course.sentence(_error_of(step, course.metric) or 0.0) if course else ""


def best_step(step: StepRun) -> int | None:
    """The step of the best evaluation; None if there were fewer than three."""
    course = judged_course(step)
    if course is None or len({at for at, _ in step.points(course.metric)}) < _FEWEST:
        return None
    return course.best[0]


def headline(step: StepRun) -> list[HeadlineFigure]:
    """A step's headline figures."""
    figures = []
    course, best = judged_course(step), best_step(step)
    got_worse = bool(worse_sentence(step))
    for line in step.declaration.headlines:
        points = step.points(line.metric)
        if not points:
            continue
        by_step = dict(points)
        last = points[-1][0] if course is None else course.last[0]
        after = by_step.get(last, points[-1][1]) if len(points) > 1 else None
        note = ""
        if best is not None and best in by_step and course is not None:
            its = shown(by_step[best])
            note = f"best: {its} {when(best)}" if line.metric == course.metric else f"{its} at the best step, {best:,}"
            if best == last:  # the model is the best: the run ended with it, or chose it
                note = "best at the end" if best == points[-1][0] else f"of the best step, {best:,}"
        figures.append(HeadlineFigure(line.title, points[0][1], after, _error_of(step, line.metric), note, got_worse))
    return figures


def _judged_metric(step: StepRun) -> str | None:
    given = step.settings.get("metric_for_best_model")
    names = step.names
    spellings = (given, f"eval/{given}", f"eval/{str(given).removeprefix('eval_')}") if given else ()
    return next((name for name in (*spellings, *JUDGED) if name in names), None)


def _error_of(step: StepRun, metric: str) -> float | None:
    keys = (line.standard_error for line in step.declaration.headlines if line.metric == metric and line.standard_error)
    return next((finite(step.summary.get(key)) for key in keys), None)
