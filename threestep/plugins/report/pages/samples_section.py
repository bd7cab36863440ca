"""The report's samples: responses side by side, and ranked responses with their scores, before and after training.

Every text is a model's or a user's, and passes through `escape`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from threestep.plugins.report.figures.numbers import shown
from threestep.plugins.report.figures.ranked_samples import (
    Change,
    RankedSample,
    has_ranked_samples,
    margins_along,
    ranked_samples,
)
from threestep.plugins.report.figures.sample_media import media_shown
from threestep.plugins.report.figures.tables import FIRST, Sampled, SampledAnswer, answers_along, sampled_rows
from threestep.plugins.report.pages.document import direction

if TYPE_CHECKING:
    from threestep.plugins.report.figures.reading import StepRun


def samples_section(steps: Sequence[StepRun]) -> str:
    """HTML of the section: the samples of each kind of step; "" without any step."""
    silent = [step for step in steps if not step.samples and step.lines]
    labels = ", ".join(dict.fromkeys(step.label for step in silent))
    without = (
        f'<p class="soft">No samples for {escape(labels)}: the run folder has no samples.jsonl.</p>' if silent else ""
    )
    by_kind: dict[str, list[StepRun]] = {}
    for step in (step for step in steps if step.samples):
        by_kind.setdefault(step.declaration.kind, []).append(step)
    return without + "".join(_kind(of_kind, len(by_kind) > 1) for of_kind in by_kind.values())


def first_sample(steps: Sequence[StepRun]) -> str:
    """A sample of the last step that has some, before and after training, for the page's top: the first whose response
    changed, if one did. "" without samples."""
    with_samples = sorted((step for step in steps if step.samples), key=lambda step: step.place)
    last = [step for step in with_samples if step.declaration is with_samples[-1].declaration]
    if not last:
        return ""
    if has_ranked_samples(last[0]):
        judged = ranked_samples(last)
        row = next((row for row in judged if row.why == FIRST), judged[0])
        card = _ranked_card(row, last[0].declaration.figures.samples.score)
    else:
        rows = sampled_rows(last)
        changed = (row for row in rows if len({answer.text for answer in row.answers}) > 1)
        card = answers_card(next(changed, rows[0]))
    label = last[0].label
    title = f'<p class="soft">A held-out sample ({escape(label)}); <a href="#samples">all samples</a></p>'
    return f'<div class="short">{title}{card}</div>'


def _kind(steps: Sequence[StepRun], several: bool) -> str:
    declaration = steps[0].declaration
    cards = _ranked(steps) if has_ranked_samples(steps[0]) else _side_by_side(steps)
    title = f'<h3 class="kind">{escape(steps[0].label)}</h3>' if several else ""
    return f'{title}<p class="soft">{escape(declaration.figures.samples.note)}</p>{cards}'


def _side_by_side(steps: Sequence[StepRun]) -> str:
    cards = _titled((row.why, answers_card(row)) for row in sampled_rows(steps))
    return cards + "".join(_along(step, len(steps) > 1) for step in steps)


def _titled(cards: Iterable[tuple[str, str]]) -> str:
    """Cards below their reasons, each reason once. cards: reason and HTML."""
    parts = []
    for why, of_reason in groupby(cards, key=lambda each: each[0]):
        parts += [f"<h3>{escape(why)}</h3>", *(card for _, card in of_reason)]
    return "".join(parts)


def answers_card(row: Sampled) -> str:
    """A prompt with its responses side by side."""
    truth = f'<p class="soft">expected: {escape(row.ground_truth)}</p>' if row.ground_truth else ""
    first: dict[str, SampledAnswer] = {}  # of each run: scores of different reward models cannot be compared
    answers = "".join(_answer(answer, first.setdefault(answer.run, answer)) for answer in row.answers)
    return _sample(row.prompt, row.media, truth, answers)


def _sample(prompt: str, media: tuple[str | None, ...], truth: str, answers: str, *, below: str = "") -> str:
    return (
        f'<div class="card sample"><div class="text prompt" dir="{direction(prompt)}" tabindex="0">'
        f"{escape(prompt)}</div>{media_shown(media)}{truth}"
        f'<div class="answers">{answers}</div>{below}</div>'
    )


def _along(step: StepRun, several: bool) -> str:
    """The first prompts at every evaluation."""
    rows = answers_along(step)
    if len({answer.column for row in rows for answer in row.answers}) < 3:
        return ""  # the first and the last stand above
    cards = "".join(map(answers_card, rows))
    title = f"At every evaluation{f': {step.run}' if several else ''}"
    return f"<details><summary>{escape(title)}</summary>{cards}</details>"


def _answer(answer: SampledAnswer, first: SampledAnswer) -> str:
    marks = []
    for name, value in answer.marks:
        before = dict(first.marks).get(name)
        moved = value is not None and before is not None and name != "tokens" and value != before
        is_better = moved and (value < before if name == "loss" else value > before)  # type: ignore[operator]
        colour = f' class="{"good" if is_better else "bad"}"' if moved else ""
        marks.append(f"<span>{escape(name)} <b{colour}>{shown(value)}</b></span>")
    marks += [f"<span>{escape(name)} <b>{shown(value)}</b></span>" for name, value in answer.facts]
    if not answer.ended:
        marks.append(f'<span class="bad">cut by the {escape(_LIMITS.get(answer.cut_by, answer.cut_by))} limit</span>')
    text = "(no response was drawn)" if answer.text is None else escape(answer.text.strip()) or "(empty)"
    return _box(answer.column, _conversation(answer.parts) if answer.parts else text, "".join(marks))


_LIMITS = {"tokens": "length", "turns": "turn", "calls": "call", "seconds": "time"}  # by what a sample calls them


def _conversation(parts: Sequence[tuple[str, str]]) -> str:
    """The parts of a conversation below each other, the model's distinguished from the others."""
    return "".join(
        f'<div class="{"said" if who == "model" else "heard"}"><span class="soft">{escape(who)}</span>'
        f"<div>{escape(text.strip()) or '(empty)'}</div></div>"
        for who, text in parts
    )


def _box(title: str, text: str, marks: str) -> str:
    """A response with its numbers. text, marks: HTML."""
    return (
        f'<div class="answer"><p class="soft">{escape(title)}</p>'
        f'<div class="text" dir="{direction(text)}" tabindex="0">{text}</div><div class="marks">{marks}</div></div>'
    )


# --- ranked responses


def _ranked(steps: Sequence[StepRun]) -> str:
    score = steps[0].declaration.figures.samples.score
    cards = _titled((row.why, _ranked_card(row, score)) for row in ranked_samples(steps))
    return cards + "".join(_margins_along(step, len(steps) > 1) for step in steps)


def _ranked_card(row: RankedSample, score: str) -> str:
    boxes = "".join(
        _box(label, escape(text.strip()) or "(empty)", _changes(score, scores)) for label, text, scores in row.responses
    )
    margin = f'<div class="marks">{_changes("margin", row.margins, has_sign=True)}</div>'
    return _sample(row.prompt, row.media, "", boxes, below=margin)


def _changes(name: str, changes: Sequence[Change], has_sign: bool = False) -> str:
    """A number before and after training, for each run. has_sign: it is good above 0 and bad below."""
    marks = []
    for change in changes:
        last = change.before if change.after is None else change.after
        colour = f' class="{"good" if last > 0 else "bad"}"' if has_sign and last else ""
        text = shown(change.before) if change.after is None else f"{shown(change.before)} → {shown(change.after)}"
        label = name if len(changes) == 1 else f"{change.run}: {name}"
        marks.append(f"<span>{escape(label)} <b{colour}>{text}</b></span>")
    return "".join(marks)


def _margins_along(step: StepRun, several: bool) -> str:
    """The first rows at every evaluation."""
    rows = margins_along(step)
    if len({when for _, _, margins in rows for when, _ in margins}) < 3:
        return ""  # the first and the last stand above
    cards = "".join(
        _sample(prompt, media, "", "", below=f'<div class="marks">{_each_margin(margins)}</div>')
        for prompt, media, margins in rows
    )
    title = f"Margins at every evaluation{f': {step.run}' if several else ''}"
    return f"<details><summary>{escape(title)}</summary>{cards}</details>"


def _each_margin(margins: Sequence[tuple[str, float | None]]) -> str:
    return "".join(f"<span>{escape(when)} <b>{shown(margin)}</b></span>" for when, margin in margins)
