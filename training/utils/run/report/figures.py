"""Which figures of a step are drawn, and how they are called: tables of names, and the charts made from them.

A metric that no table names is not lost: the report lists every metric with its first and last value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from training.utils.run.report.charts import (
    Chart,
    HistogramChart,
    Line,
    LineChart,
    ScatterChart,
    histogram_of,
)
from training.utils.run.report.reading import StepRun, finite

# kind: (title, note, metrics by their labels). A label that begins with "held-out" is an evaluation's.
_SPEED = ("Throughput", "tokens a second, all ranks", {"tokens a second": "train/tokens_per_second"})
_RATE = ("Learning rate", "", {"learning rate": "train/learning_rate"})
CURVES: dict[str, tuple[tuple[str, str, dict[str, str]], ...]] = {
    "sft": (
        ("Loss", "nats a token", {"training": "train/loss", "held-out": "eval/loss"}),
        (
            "Token accuracy",
            "share of tokens that are the model's first choice",
            {"training": "train/token_accuracy", "held-out": "eval/token_accuracy"},
        ),
        _SPEED,
        _RATE,
    ),
    "reward": (
        ("Loss", "a prompt", {"training": "train/loss", "held-out": "eval/loss"}),
        (
            "Accuracy",
            "share of pairs whose chosen response scores higher",
            {"training": "train/accuracy", "held-out": "eval/accuracy"},
        ),
        ("Score gap", "chosen minus rejected", {"held-out": "eval/score_gap"}),
        _SPEED,
        _RATE,
    ),
    "dpo": (
        ("Loss", "a prompt", {"training": "train/loss", "held-out": "eval/loss"}),
        (
            "Accuracy",
            "share of pairs whose chosen response has the higher implicit reward",
            {"training": "train/accuracy", "held-out": "eval/accuracy"},
        ),
        (
            "Implicit reward",
            "of training pairs",
            {"chosen": "train/chosen_reward", "rejected": "train/rejected_reward"},
        ),
        (
            "Reward margin",
            "chosen minus rejected",
            {"training": "train/reward_margin", "held-out": "eval/reward_margin"},
        ),
        _SPEED,
        _RATE,
    ),
    "ppo": (
        (
            "Reward",
            "mean score of a response",
            {"rollouts": "rollout/score", "held-out prompts": "eval/reward", "held-out, greedy": "eval_greedy/reward"},
        ),
        ("Checker", "mean on prompts that nothing trains on", {"held-out prompts": "eval/check"}),
        ("KL to the reference", "nats a response", {"rollouts": "rollout/kl"}),
        (
            "Response length",
            "tokens",
            {"rollouts": "rollout/response_tokens", "held-out prompts": "eval/response_tokens"},
        ),
        ("Entropy", "nats a token", {"rollouts": "rollout/entropy", "training": "actor/entropy"}),
        (
            "Ended responses",
            "share that ended before the length limit",
            {"rollouts": "rollout/ended_share", "held-out prompts": "eval/ended_share"},
        ),
        ("Policy loss", "", {"actor": "actor/policy_loss"}),
        ("Value loss", "", {"critic": "critic/value_loss"}),
        (
            "Clipped share",
            "of tokens whose update was clipped",
            {"actor": "actor/clip_fraction", "critic": "critic/clip_fraction"},
        ),
        _SPEED,
        (_RATE[0], "", {"actor": "actor/learning_rate", "critic": "critic/learning_rate"}),
    ),
    "other": (
        ("Loss", "", {"training": "train/loss", "held-out": "eval/loss"}),
        _SPEED,
        _RATE,
    ),
}

# kind: (title, metric of the evaluations, key in summary.json of the standard error of its gain)
HEADLINES: dict[str, tuple[tuple[str, str, str | None], ...]] = {
    "sft": (("SFT loss", "eval/loss", None), ("Token accuracy", "eval/token_accuracy", None)),
    "reward": (("Pair accuracy", "eval/accuracy", None), ("Score gap", "eval/score_gap", None)),
    "dpo": (("DPO pair accuracy", "eval/accuracy", None), ("Reward margin", "eval/reward_margin", None)),
    "ppo": (
        ("Mean reward", "eval/reward", "reward_standard_error"),
        ("Checker", "eval/check", "checker_standard_error"),
    ),
    "other": (("Loss", "eval/loss", None),),
}

_PHASE = re.compile(r"^(?:.*/)?time[/_](?P<name>.+?)(?:_seconds)?$")
_OF_LINES = {"train": "training", "eval": "evaluation", "reference": "reading the reference"}
_MOST_DOTS = 400  # of one cloud


def curves_of(steps: Sequence[StepRun]) -> list[LineChart]:
    """The charts of one kind of step; several runs of it share each chart, a colour each."""
    charts = []
    for title, note, metrics in CURVES[steps[0].kind]:
        for part, own in _parts(title, metrics, several=len(steps) > 1):
            lines = [line for place, step in enumerate(steps) for line in _lines(step, own, place, len(steps) > 1)]
            if title == _RATE[0]:
                lines = [replace(line, is_smooth=True) for line in lines]
            if any(line.known for line in lines):
                charts.append(LineChart(part, tuple(lines), note))
    return charts


def _parts(title: str, metrics: dict[str, str], several: bool) -> list[tuple[str, dict[str, str]]]:
    """The chart itself; of several runs one for each metric of training, as colours tell the runs apart."""
    of_training = [label for label in metrics if not label.startswith("held-out")]
    if not several or len(of_training) < 2:
        return [(title, metrics)]
    return [(f"{title}: {label}", {label: metrics[label]}) for label in of_training]


def _lines(step: StepRun, metrics: dict[str, str], place: int, several: bool) -> list[Line]:
    present = [(label, points) for label, name in metrics.items() if (points := step.points(name))]
    lines = []
    for index, (label, points) in enumerate(present):
        named = label if not several else f"{step.run}: {label}" if len(metrics) > 1 else step.run
        lines.append(Line(named, points, place if several else index, label.startswith("held-out")))
    return lines


def score_charts(step: StepRun) -> list[HistogramChart]:
    """How the reward model scores held-out chosen and rejected responses, before and after training."""
    charts = []
    for part, when in (("before", "before training"), ("evaluation", "after training")):
        report = step.reward_report.get(part)
        bins = report.get("histogram") if isinstance(report, dict) else None
        if not isinstance(bins, dict) or not bins.get("edges"):
            continue
        edges, chosen, rejected = (_numbers(bins.get(name)) for name in ("edges", "chosen", "rejected"))
        if len(chosen) == len(rejected) == len(edges) - 1:
            counts = (("chosen", _whole(chosen)), ("rejected", _whole(rejected)))
            charts.append(
                HistogramChart(f"Scores {when}", tuple(edges), counts, "score", "% of the responses of held-out pairs")
            )
    return charts


def sample_charts(step: StepRun) -> list[Chart]:
    """What the samples say of rewards and lengths, at the first and at the last evaluation."""
    kinds = []
    for label, samples in sample_groups(step):
        read = [(finite(sample.get("response_tokens")), finite(sample.get("reward"))) for sample in samples]
        kinds.append(
            (label, [(tokens, reward) for tokens, reward in read if tokens is not None and reward is not None])
        )
    kinds = [(label, pairs) for label, pairs in kinds if pairs]
    if not kinds:
        return []
    edges, counts = histogram_of([(label, [reward for _, reward in pairs]) for label, pairs in kinds])
    told = ", ".join(f"{label} {_correlation(pairs)}" for label, pairs in kinds)
    # Equal lengths would hide each other; the golden ratio's multiples spread evenly.
    clouds = tuple(
        (
            label,
            tuple((tokens + 0.7 * ((place * 0.6180339887) % 1 - 0.5), reward) for place, (tokens, reward) in chosen),
        )
        for label, chosen in ((label, list(enumerate(_some(pairs)))) for label, pairs in kinds)
    )
    return [
        HistogramChart("Rewards of held-out prompts", edges, tuple(counts), "reward", "% of the responses"),
        ScatterChart(
            "Length and reward",
            clouds,
            "response tokens (spread sideways a little)",
            "reward",
            f"reward of each response; correlation with its length: {told}",
        ),
    ]


def sample_groups(step: StepRun) -> list[tuple[str, list[dict[str, Any]]]]:
    """[("SFT", samples), ("PPO", samples)]: those of the first evaluation and, if there was another, of the last."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for sample in step.samples:
        found.setdefault(repr(sample.get("step")), []).append(sample)
    groups = list(found.values())
    names = ("SFT", "PPO")
    return [(name, group) for name, group in zip(names, (groups[:1] + groups[1:][-1:]), strict=False)]


def phase_seconds(step: StepRun) -> tuple[list[tuple[str, float]], float]:
    """([(phase, seconds)], seconds of the whole loop), summed over the run.

    Where a line of metrics.jsonl names phases (`time/NAME`, `time_NAME_seconds`), theirs; the rest of the time since
    the line before goes to what the line tells of. Phases that lie inside others may add up to more than the whole.
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
        place = _told_of(line) if not any(phase_name(name) for name in line) else "the rest"
        if spent > 0:
            sums[place] = sums.get(place, 0.0) + spent
    rest = sums.pop("the rest", None)
    return [*sums.items(), *([("the rest", rest)] if rest else [])], total


def phase_name(metric: str) -> str | None:
    """The phase whose time a metric is, in words; None of other metrics."""
    found = _PHASE.match(metric)
    return found["name"].replace("_", " ").replace("/", " ") if found else None


def headline(step: StepRun) -> list[tuple[str, float | None, float | None, float | None]]:
    """(title, before, after, standard error of the gain) of the figures that say how a step went. after: None where
    there was one evaluation."""
    found = []
    for title, metric, error in HEADLINES[step.kind]:
        values = [value for _, value in step.points(metric)]
        if values:
            after = values[-1] if len(values) > 1 else None
            found.append((title, values[0], after, finite(step.summary.get(error)) if error else None))
    return found


def _told_of(line: dict[str, Any]) -> str:
    names = [name for name in line if name not in ("step", "seconds")]
    return _OF_LINES.get(names[0].split("/")[0], "training") if names else "training"


def _some(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return list(pairs[:: -(-len(pairs) // _MOST_DOTS)])


def _correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Pearson's, of two places; "–" where one of both never changes."""
    count = len(pairs)
    means = [sum(pair[axis] for pair in pairs) / count for axis in (0, 1)]
    moved = [(tokens - means[0], reward - means[1]) for tokens, reward in pairs]
    spreads = [sum(pair[axis] ** 2 for pair in moved) for axis in (0, 1)]
    if min(spreads) <= 0:
        return "–"
    return f"{sum(a * b for a, b in moved) / (spreads[0] * spreads[1]) ** 0.5:+.2f}".replace("-", "−")


def _numbers(values: Any) -> list[float]:
    """The finite numbers of a list; empty of anything else."""
    if not isinstance(values, list):
        return []
    return [number for value in values if (number := finite(value)) is not None]


def _whole(values: Sequence[float]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
