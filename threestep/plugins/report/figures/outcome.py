"""The outcome of a step: the evaluation that was best, the one that the model is of, and whether it got worse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from threestep.plugins.report.figures.course import Course, course_of, when
from threestep.plugins.report.figures.numbers import shown, shown_together
from threestep.plugins.report.figures.reading import finite
from training.utils.run.metrics import greater_wins, judged_metric

if TYPE_CHECKING:
    from threestep.plugins.report.figures.reading import StepRun

_FEWEST = 3  # evaluations that have a best one: of two, both are shown
# A fall of the chosen responses' log-probability that is warned of, in nats: this, or as much per token of a row, if
# that is more. Learning from pairs lowers it by some; a model that falls further writes what no row has.
_FALL, _FALL_PER_TOKEN = 5.0, 0.1


@dataclass(frozen=True)
class HeadlineFigure:
    """A headline metric before and after training; after: None if there was one evaluation, or nothing to compare with.
    error: standard error of the gain. note: the value at the best evaluation, if that is not the last one. meaning:
    what it is, or its unit. got_worse: it is what the run is judged by, and got worse."""

    title: str
    before: float | None
    after: float | None
    error: float | None = None
    note: str = ""
    meaning: str = ""
    got_worse: bool = False


def judged_course(step: StepRun) -> Course | None:
    """The course of what the run is judged by (--metric_for_best_model). Its last value is the model's, which is that
    of the best evaluation after --load_best_model_at_end."""
    given = step.settings.get("metric_for_best_model")
    metric = judged_metric(step.names, str(given) if given else None) or judged_metric(step.names, None)
    if metric is None:
        return None
    greater, points = step.settings.get("greater_is_better"), step.points(metric)
    greater = greater if isinstance(greater, bool) else None
    course = course_of(metric, points, greater)
    trained = course_of(metric, [point for point in points if point[0]], greater)
    took_best = step.summary and step.settings.get("load_best_model_at_end")
    return replace(course, last=trained.best) if course and trained and took_best else course


def worse_sentence(step: StepRun) -> str:
    """The sentence of a run that further training made worse; "" for others, also where the loss is no headline figure
    and all of these got better: a model that ranks better, and is too sure of what it ranks wrong."""
    course = judged_course(step)
    if course is None:
        return ""
    lines = {line.metric: line for line in step.declaration.figures.headlines if step.points(line.metric)}
    better = []
    for metric, line in lines.items():
        values = dict(step.points(metric))
        then, now = (values.get(at) for at in (course.best[0], course.last[0]))
        if metric != course.metric and then is not None and now is not None:
            if now > then if greater_wins(metric) else now < then:
                better.append(f"{line.title} got better, {shown(then)} to {shown(now)}")
    if 0 < len(lines) == len(better):
        return ""
    return course.sentence(_error_of(step, course.metric) or 0.0, "; ".join(better))


def fallen_sentence(step: StepRun) -> str:
    """The sentence of a run on pairs after which the chosen responses are far less likely; "" for others."""
    rewards = [value for _, value in step.points("eval/chosen_reward") if value is not None]
    first_beta = finite(step.settings.get("beta"))
    last_beta = finite(step.settings.get("final_beta")) or first_beta
    if not rewards or not first_beta or not last_beta:
        return ""
    fall = rewards[0] / first_beta - rewards[-1] / last_beta
    report = step.reports.data_report.get("eval")
    rows, tokens = (finite(report.get(name)) if isinstance(report, dict) else None for name in ("rows", "tokens"))
    if fall <= max(_FALL, _FALL_PER_TOKEN * (tokens or 0.0) / (rows or 1.0)):
        return ""
    return (
        f"the held-out chosen responses' log-probability fell by {shown(fall)} nats per response: the model may write "
        "garbage even if all figures of pairs are good; lower --learning_rate, or give --sft_coef 0.1, and read what "
        "threestep chat answers"
    )


def best_step(step: StepRun) -> int | None:
    """The step of the best evaluation; None if there were fewer than three."""
    course = judged_course(step)
    has_best = course is not None and len(dict(step.points(course.metric))) >= _FEWEST
    return course.best[0] if has_best and course is not None else None


def headline(step: StepRun) -> list[HeadlineFigure]:
    """A step's headline figures."""
    figures = []
    course, best, got_worse = judged_course(step), best_step(step), bool(worse_sentence(step))
    for line in step.declaration.figures.headlines:
        points = step.points(line.metric)
        if not points:
            continue
        values, last = dict(points), points[-1][0]
        at = course.last[0] if course is not None and course.last[0] in values else last
        is_judged = course is not None and line.metric == course.metric
        after = values[at] if len(points) > 1 else None
        note = ""
        if best is not None and best in values:
            its, now = shown_together(values[best], values[at])
            if best == at:  # the run ended with its best, or took it
                note = "best at the end" if best == last else f"from the best step, {best:,}"
                if course is not None and not is_judged:
                    note = f"at the best {course.name} (step {best:,})"
            elif its == now:
                pass
            elif is_judged:
                note = f"best: {its} {when(best)}" if best else "best before training"
            elif course is not None and best:
                note = f"{its} at the best {course.name} (step {best:,})"
        error = _error_of(step, line.metric)
        before = points[0][1]
        if after is not None and _is_tied(step):  # at the start of DPO, where no response is ahead
            before, after, note = after, None, note or "not compared: before training, all pairs tie"
        meaning = _meaning(step, line.metric)
        figures.append(HeadlineFigure(line.title, before, after, error, note, meaning, is_judged and got_worse))
    return figures


def _is_tied(step: StepRun) -> bool:
    """True if the first evaluation found every margin 0: the policy is still its reference."""
    return [value for at, value in step.points("eval/reward_margin")[:1] if not at] == [0.0]


def _meaning(step: StepRun, metric: str) -> str:
    """The note of a metric's chart."""
    curves = step.declaration.figures.curves
    return next((curve.note for curve in curves if metric in curve.metrics.values()), "")


def _error_of(step: StepRun, metric: str) -> float | None:
    keys = (
        line.standard_error
        for line in step.declaration.figures.headlines
        if line.metric == metric and line.standard_error
    )
    return next((finite(step.summary.get(key)) for key in keys), None)
