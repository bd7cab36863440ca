"""A report's tables as records: samples side by side, rows left out, settings. Plain text, not yet escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threestep.plugins.report.figures.numbers import shown
from threestep.plugins.report.figures.outcome import best_step
from threestep.plugins.report.figures.reading import StepRun, finite
from threestep.plugins.report.figures.rollout_account import rollout_account
from threestep.plugins.report.figures.sample_media import sample_media
from training.utils.run.run_folder import read_rollouts

_MOST_EVALUATIONS = 40  # lines of their table
_FIRST, _MOST_CHANGED = 4, 4  # prompts to show: the first of the data, and those that rose and fell most, each
FIRST = "First held-out rows"  # why a sample is shown
_LONGEST_TEXT = 4000  # characters of one text


@dataclass(frozen=True)
class SampledAnswer:
    """One response and its scores. text: None where none was drawn. marks: (name, value), the reward or loss first.

    parts: of a conversation, (role, text) in turns. facts: (name, value) that are neither good nor bad. cut_by: the
    limit that ended a conversation.
    """

    run: str
    column: str
    text: str | None
    marks: tuple[tuple[str, float | None], ...]
    ended: bool
    parts: tuple[tuple[str, str], ...] = ()
    facts: tuple[tuple[str, float], ...] = ()
    cut_by: str = "length"


@dataclass(frozen=True)
class Sampled:
    """A prompt and its responses by column. why: the heading that it is shown under. media: of `sample_media`."""

    why: str
    prompt: str
    ground_truth: str
    answers: tuple[SampledAnswer, ...]
    media: tuple[str | None, ...] = ()


def sampled_rows(steps: Sequence[StepRun]) -> list[Sampled]:
    """Prompts of the first run with every run's responses before and after training: the first prompts, and those whose
    reward rose or fell most in the first run."""
    columns: list[tuple[str, str, dict[str, dict[str, Any]]]] = []
    for step in steps:
        for label, samples in step.samples:
            name = label if len(steps) == 1 else f"{step.run}: {label}"
            columns.append((step.run, name, {_key(sample): sample for sample in samples}))
    if not columns:
        return []
    groups = [samples for _, _, samples in columns]
    picked = _picked(groups, len(steps[0].samples) > 1)
    return [
        Sampled(
            why,
            clipped(text_of(groups[0][key].get("prompt"))),
            clipped(text_of(groups[0][key].get("ground_truth"))),
            tuple(_answer(run, name, samples[key]) for run, name, samples in columns if key in samples),
            sample_media(steps[0].path, groups[0][key]),
        )
        for why, key in picked
    ]


def answers_along(step: StepRun) -> list[Sampled]:
    """The first prompts with their answer at each evaluation."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in step.first_prompts:
        by_prompt.setdefault(_key(sample), []).append(sample)
    return [
        Sampled(
            "",
            clipped(text_of(samples[0].get("prompt"))),
            "",
            tuple(_answer(step.run, f"step {sample.get('step')}", sample) for sample in samples),
            sample_media(step.path, samples[0]),
        )
        for samples in by_prompt.values()
    ]


def paired_rows(run: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Sampled]:
    """Samples of one prompt before and after training, as rows."""
    return [
        Sampled(
            "",
            clipped(text_of(before.get("prompt"))),
            clipped(text_of(before.get("ground_truth"))),
            (_answer(run, "before", before), _answer(run, "after", after)),
        )
        for before, after in pairs
    ]


def _picked(groups: Sequence[dict[str, dict[str, Any]]], with_gains: bool) -> list[tuple[str, str]]:
    """(why, key of a prompt), each prompt once; only prompts that every group has, if there are any."""
    keys = [key for key in groups[0] if all(key in group for group in groups)] or list(groups[0])
    has_rewards = any("reward" in group[key] for group in groups for key in keys if key in group)
    first = [(FIRST, key) for key in keys[: _FIRST if has_rewards else _FIRST + _MOST_CHANGED]]
    if not with_gains:
        return first
    gains = []
    for key in keys[_FIRST:]:
        before, after = (finite(group.get(key, {}).get("reward")) for group in groups[:2])
        if before is not None and after is not None:
            gains.append((after - before, key))
    gains.sort(key=lambda pair: pair[0])
    rose = [("Reward rose most", key) for gain, key in reversed(gains[-_MOST_CHANGED:]) if gain > 0]
    fell = [("Reward fell most", key) for gain, key in gains[:_MOST_CHANGED] if gain < 0]
    return first + rose + fell


def _answer(run: str, column: str, sample: Mapping[str, Any]) -> SampledAnswer:
    marks: list[tuple[str, float | None]] = []
    marks += [(name, finite(sample[name])) for name in ("reward", "loss") if name in sample]
    marks += [
        (name.removeprefix("reward/"), finite(value))
        for name, value in sample.items()
        if name == "check" or (name.startswith(("reward/", "check/")) and name != "reward/model")
    ]
    text = None
    if "response" in sample:
        marks.append(("tokens", finite(sample.get("response_tokens"))))
        text = clipped(text_of(sample["response"]))
    ended, cut_by = sample.get("ended") is not False, text_of(sample.get("cut_by")) or "length"
    return SampledAnswer(run, column, text, tuple(marks), ended, _parts(sample), _facts(sample), cut_by)


def _parts(sample: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """(role, text) of each turn of a conversation, up to `_LONGEST_TEXT` characters; empty for a single turn."""
    parts, room = list[tuple[str, str]](), _LONGEST_TEXT
    given = sample.get("parts")
    pairs = [part for part in given if isinstance(part, list) and len(part) == 2] if isinstance(given, list) else []
    for who, text in pairs if len(pairs) > 1 else ():
        if room <= 0:
            parts.append(("", f"({len(pairs) - len(parts):,} more parts)"))
            break
        parts.append((text_of(who), clipped(text_of(text), room)))
        room -= len(text_of(text))
    return tuple(parts)


def _facts(sample: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Number of turns of a conversation, and the nonzero figures of its environment."""
    figures = sample.get("environment_figures")
    named = {"turns": sample.get("turns"), **(figures if isinstance(figures, dict) else {})}
    return tuple((name, number) for name, value in named.items() if (number := finite(value)))


def _key(sample: dict[str, Any]) -> str:
    return f"{sample.get('uid', '')}|{sample.get('prompt')}"


def clipped(text: str, most: int = _LONGEST_TEXT) -> str:
    """`text`, or its beginning and how many characters follow."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def left_out(step: StepRun) -> list[tuple[str, str]]:
    """(what, count) of rows dropped or cut, optimizer steps skipped and responses cut at the length limit; the
    account of the prompts of each epoch of step 3."""
    rows = []
    for split, name in (("train", "training rows"), ("eval", "held-out rows")):
        report = step.reports.data_report.get(split)
        if isinstance(report, dict):
            rows.append((name, f"{_count(report.get('rows'))} ({_count(report.get('tokens'))} tokens)"))
            rows.append((f"{name} cut", _count(report.get("truncated"))))
            dropped = report.get("dropped")
            reasons = dropped.items() if isinstance(dropped, dict) else ()
            counts = ", ".join(f"{_count(count)} {str(reason).replace('_', ' ')}" for reason, count in reasons)
            rows.append((f"{name} dropped", counts or "none"))
            noted = report.get("noted")
            for what, count in noted.items() if isinstance(noted, dict) else ():
                rows.append((f"{name}: {what}", _count(count)))
            if report.get("duplicates"):
                rows.append((f"{name} that repeat an earlier row", _count(report["duplicates"])))
    skipped = [value or 0.0 for name in step.names if name.endswith("/skipped") for _, value in step.points(name)]
    if skipped:
        rows.append(("optimizer steps skipped because of overflow", _count(sum(skipped))))
    for account in rollout_account(read_rollouts(step.path)):
        rows.append(("prompts", account.sentence()))
    for label, samples in step.samples:
        if not any("reward" in sample for sample in samples):
            continue  # what is drawn for the report alone is short on purpose
        cut = sum(sample.get("ended") is False for sample in samples)
        limit = "a limit" if any("cut_by" in sample for sample in samples) else "the length limit"
        said = f"responses {label} training" if label in ("before", "after") else f"responses of {label}"
        rows.append((f"{said} cut by {limit}", f"{cut:,} of {len(samples):,}"))
    return rows


def harness_rows(step: StepRun) -> list[list[str]]:
    """[task, metric, value with its standard error, rows, examples, chat template, version] of each figure of
    lm-evaluation-harness on the step's model."""
    rows = []
    for task, given in step.reports.harness.items():
        found = given if isinstance(given, dict) else {}
        metrics = found.get("metrics")
        for metric, figure in metrics.items() if isinstance(metrics, dict) else ():
            value, error = (
                (finite(figure.get(name)) for name in ("value", "error")) if isinstance(figure, dict) else (None, None)
            )
            text = shown(value) + ("" if error is None else f" ± {shown(error)}")
            template = "yes" if found.get("chat_template") else "no"
            counts = [_count(found.get(name)) for name in ("rows", "fewshot")]
            rows.append([task, metric, text, *counts, template, text_of(found.get("lm_eval"))])
    return rows


def settings_rows(steps: Sequence[StepRun]) -> tuple[list[tuple[str, list[str]]], list[tuple[str, list[str]]]]:
    """(settings that differ between the runs, the others), each as (name, value in each run). Where a run is
    written, and over what, is no difference."""
    ignored = {"output_dir", "overwrite", "resume"} if len(steps) > 1 else set()
    names = sorted({name for step in steps for name in step.settings} - ignored)
    rows = [(name, [_setting(step, name) for step in steps]) for name in names]
    return [row for row in rows if len(set(row[1])) > 1], [row for row in rows if len(set(row[1])) == 1]


def metric_rows(step: StepRun) -> list[tuple[str, list[float | None], int]]:
    """(metric, [first, last, least, greatest], number of values that are not finite) of every metric."""
    rows = []
    for name in step.names:
        values = [value for _, value in step.points(name)]
        known = [value for value in values if value is not None]
        extremes = [min(known), max(known)] if known else [None, None]
        rows.append((name, [values[0], values[-1], *extremes], len(values) - len(known)))
    return rows


def evaluations(step: StepRun) -> tuple[list[str], list[tuple[int, list[float | None]]]]:
    """(metrics, [(step, values)]) of the evaluations, evenly spaced ones if there are many; nothing of fewer than
    three. The metrics are those that the report draws or sums up."""
    drawn = [name for curve in step.declaration.figures.curves for name in curve.metrics.values()]
    named = dict.fromkeys([*(line.metric for line in step.declaration.figures.headlines), *drawn])
    metrics = [name for name in named if name.startswith("eval/") and step.points(name)]
    by_metric = {name: dict(step.points(name)) for name in metrics}
    steps = sorted({int(at) for points in by_metric.values() for at in points})
    if len(steps) < 3:
        return [], []
    apart = -(-len(steps) // _MOST_EVALUATIONS)
    kept = {*steps[::apart], steps[-1], *(at for at in steps if at == best_step(step))}
    return metrics, [(at, [by_metric[name].get(at) for name in metrics]) for at in sorted(kept)]


def _count(value: Any) -> str:
    number = finite(value)
    return "–" if number is None else f"{number:,.0f}"


def _setting(step: StepRun, name: str) -> str:
    if name not in step.settings:
        return "–"
    value = step.settings[name]
    return "none" if value is None or value == "" else text_of(value)


def text_of(value: Any) -> str:
    """A value of a user's file as text; "" for none."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
