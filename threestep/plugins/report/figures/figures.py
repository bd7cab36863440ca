"""A step's charts and times, from its metrics, samples and STEP declaration.

A metric without a chart is not lost: the report lists every metric with its first and last value.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from threestep.plugins.report.figures.charts import (
    Chart,
    ChartLine,
    HistogramChart,
    LineChart,
    ScatterChart,
    histogram_of,
)
from threestep.plugins.report.figures.outcome import best_step, judged_course
from threestep.plugins.report.figures.reading import StepRun, finite
from training.utils.run.run_folder import read_rollouts

if TYPE_CHECKING:
    from training.utils.flags.step import Curve

_PHASE = re.compile(r"^(?:.*/)?time[/_](?!per_token_ms/)(?P<name>.+?)(?:_seconds)?$")
_OTHER = "other"
_OF_LINES = {"train": "training", "eval": "evaluation", "reference": "reading the reference"}
_MOST_DOTS = 400  # of one cloud
_MOST_SERVERS = 8  # of a chart, which has so many colours


def curves_of(steps: Sequence[StepRun]) -> list[LineChart]:
    """The charts of one kind of step; several runs share each chart, with a colour each."""
    charts = []
    for curve in steps[0].declaration.figures.curves:
        for part in [curve] if len(steps) == 1 else _parts(curve):
            lines = [line for place, step in enumerate(steps) for line in _lines(step, part, place, len(steps) > 1)]
            if any(line.known for line in lines):
                charts.append(LineChart(part.title, tuple(lines), part.note))
    of_rollouts = [draw(step, len(steps) > 1) for step in steps for draw in (rollout_chart, server_chart)]
    return charts + [chart for chart in of_rollouts if chart is not None]


def rollout_chart(step: StepRun, several: bool = False) -> LineChart | None:
    """When the rollouts of each step were drawn and trained on, in seconds, where they were drawn ahead."""
    lines = [line for line in read_rollouts(step.path) if {"began", "ended", "trained"} <= line.keys()]
    if not lines:
        return None
    start = min(min(line["began"]) for line in lines)
    times: dict[str, list[tuple[float, float | None]]] = {
        "drawing began": [(line["step"], min(line["began"]) - start) for line in lines],
        "drawing ended": [(line["step"], max(line["ended"]) - start) for line in lines],
        "trained": [(line["step"], line["trained"] - start) for line in lines],
    }
    title = "Drawn ahead" if not several else f"Drawn ahead: {step.run}"
    drawn = [ChartLine(label, points, place, is_smooth=True) for place, (label, points) in enumerate(times.items())]
    return LineChart(title, tuple(drawn), "seconds since the first rollout began, for the rollouts of each step")


def server_chart(step: StepRun, several: bool = False) -> LineChart | None:
    """Seconds of the slowest response of each rollout server in each step, which waited for the last of them, and
    the other servers with it. Of many servers those that were waited for longest."""
    slowest: dict[str, list[tuple[float, float]]] = {}
    last, steps = Counter[str](), 0
    for line in read_rollouts(step.path):
        own = {address: finite(share["slowest"]) or 0.0 for address, share in line.get("servers", {}).items()}
        for address, seconds in own.items():
            slowest.setdefault(address, []).append((line["step"], seconds))
        if len(own) > 1:
            last[max(own, key=lambda address: own[address])] += 1
            steps += 1
    if not slowest:
        return None
    ranked = sorted(slowest, key=lambda address: -sum(seconds for _, seconds in slowest[address]))[:_MOST_SERVERS]
    lines = [
        ChartLine(f"{address}, slowest in {last[address]} of {steps} steps", slowest[address], place, is_smooth=True)
        for place, address in enumerate(ranked)
    ]
    title = "Rollout servers" if not several else f"Rollout servers: {step.run}"
    more = f"; the {len(ranked)} slowest of {len(slowest)} servers" if len(ranked) < len(slowest) else ""
    return LineChart(title, tuple(lines), f"seconds for each server's slowest response in each step{more}")


def _parts(curve: Curve) -> list[Curve]:
    """For several runs a chart for each metric, as colours distinguish the runs; held-out ones first, which are
    compared. A single metric of training shares its chart with that of the evaluation."""
    held_out = [label for label in curve.metrics if label.startswith("held-out")]
    of_training = [label for label in curve.metrics if label not in held_out]
    if len(of_training) < 2:
        return [curve]
    return [
        replace(curve, title=f"{curve.title}: {label}", metrics={label: curve.metrics[label]})
        for label in (*held_out, *of_training)
    ]


def _points(step: StepRun, metric: str) -> list[tuple[float, float | None]]:
    """A metric's values; none of the reward with the penalty where no penalty is in it (--kl_in loss), which would
    repeat the score's curve."""
    points = list(step.points(metric))
    return [] if metric == "rollout/reward" and points == list(step.points("rollout/score")) else points


def _lines(step: StepRun, curve: Curve, place: int, several: bool) -> list[ChartLine]:
    present = [(label, points) for label, name in curve.metrics.items() if (points := _points(step, name))]
    lines, best, course = [], best_step(step), judged_course(step)
    by = course.name if course is not None else ""
    for index, (label, points) in enumerate(present):
        named = label if not several else f"{step.run}: {label}" if len(curve.metrics) > 1 else step.run
        colour = place if several else index
        held_out = label.startswith("held-out")
        lines.append(ChartLine(named, points, colour, held_out, curve.is_smooth, best if held_out else None, by))
    return lines


def score_charts(step: StepRun) -> list[HistogramChart]:
    """Histograms of the reward model's scores of held-out chosen and rejected responses, before and after training."""
    charts = []
    for part, when in (("before", "before training"), ("evaluation", "after training")):
        report = step.reports.reward_report.get(part)
        bins = report.get("histogram") if isinstance(report, dict) else None
        if not isinstance(bins, dict) or not bins.get("edges"):
            continue
        edges, chosen, rejected = (_numbers(bins.get(name)) for name in ("edges", "chosen", "rejected"))
        if len(chosen) == len(rejected) == len(edges) - 1:
            counts = (("chosen", tuple(map(int, chosen))), ("rejected", tuple(map(int, rejected))))
            note = "% of the responses in held-out pairs"
            charts.append(HistogramChart(f"Scores {when}", tuple(edges), counts, "score", note))
    return charts


def sample_charts(step: StepRun) -> list[Chart]:
    """Rewards and lengths of the samples, at the first and at the last evaluation."""
    kinds = []
    for label, samples in step.samples:
        read = [(finite(sample.get("response_tokens")), finite(sample.get("reward"))) for sample in samples]
        pairs = [(tokens, reward) for tokens, reward in read if tokens is not None and reward is not None]
        kinds += [(label, pairs)] if pairs else []
    if not kinds:
        return []
    edges, counts = histogram_of([(label, [reward for _, reward in pairs]) for label, pairs in kinds])
    correlations = ", ".join(f"{label} {_correlation(pairs)}" for label, pairs in kinds)
    clouds = tuple((label, _spread(pairs[:: -(-len(pairs) // _MOST_DOTS)])) for label, pairs in kinds)
    return [
        HistogramChart("Rewards of held-out prompts", edges, tuple(counts), "reward", "% of the responses"),
        ScatterChart(
            "Length and reward",
            clouds,
            "response tokens (slightly jittered)",
            "reward",
            f"reward of each response; its correlation with the length: {correlations}",
        ),
    ]


def phase_seconds(step: StepRun) -> tuple[list[tuple[str, float]], float]:
    """([(phase, seconds)], seconds of the whole loop), summed over the run.

    The phases that a line of metrics.jsonl names (`time/NAME`, `time_NAME_seconds`) have their seconds there; the rest
    of the time since the line before counts as the line's kind. Nested phases may add up to more than the whole.
    """
    sums: dict[str, float] = {}
    before = total = 0.0
    for line in step.lines:
        now = finite(line.get("seconds"))
        if now is None:
            continue
        spent, before = max(now - before, 0.0), now
        total += spent
        for name, value in line.items():
            phase = phase_name(name)
            seconds = finite(value)
            if phase is not None and seconds is not None:
                sums[phase] = sums.get(phase, 0.0) + seconds
                spent -= seconds
        place = _reported_by(line) if not any(phase_name(name) for name in line) else _OTHER
        if spent > 0:
            sums[place] = sums.get(place, 0.0) + spent
    small = sum(sums.pop(name) for name, seconds in list(sums.items()) if seconds < 0.005 * total or name == _OTHER)
    return [*sums.items(), *([(_OTHER, small)] if small else [])], total


def phase_name(metric: str) -> str | None:
    """The phase that a metric times, in words; None for other metrics."""
    match = _PHASE.match(metric)
    return re.sub(r"^\d+ ", "", match["name"].replace("_", " ").replace("/", " ")) if match else None


def _reported_by(line: dict[str, Any]) -> str:
    names = [name for name in line if name not in ("step", "seconds")]
    return _OF_LINES.get(names[0].split("/")[0], "training") if names else "training"


def _spread(pairs: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Points moved evenly apart by the golden ratio's multiples, as those with equal lengths would hide each other."""
    moves = (0.7 * ((place * 0.6180339887) % 1 - 0.5) for place in range(len(pairs)))
    return tuple((tokens + move, reward) for move, (tokens, reward) in zip(moves, pairs, strict=True))


def _correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Pearson's, to two decimals; "–" for a constant or a single pair."""
    try:
        return f"{statistics.correlation(*zip(*pairs, strict=True)):+.2f}".replace("-", "−")
    except statistics.StatisticsError:
        return "–"


def _numbers(values: Any) -> list[float]:
    """The finite numbers of a list; empty for anything else."""
    if not isinstance(values, list):
        return []
    return [number for value in values if (number := finite(value)) is not None]
