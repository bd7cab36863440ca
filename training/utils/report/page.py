"""The report as one HTML page: style inside, no script, nothing from a network.

What a model wrote is untrusted: every text passes through `escape`, and the page's policy forbids scripts and requests.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from training.utils.report.charts import Chart, HistogramChart, LineChart
from training.utils.report.figures import curves_of, headline, phase_seconds, sample_charts, score_charts
from training.utils.report.reading import ReportedRun, StepRun
from training.utils.report.style import STYLE
from training.utils.report.svg import draw, shown, sparkline
from training.utils.report.tables import SampledAnswer, left_out, metric_rows, sampled_rows, settings_rows

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(runs: Sequence[ReportedRun], written: datetime.datetime) -> str:
    """Return the whole report of the runs."""
    by_kind = _by_kind(runs)
    charts = step_charts(runs)
    sections = [(kind, _title(own), _step_section(own, charts[kind])) for kind, own in by_kind.items()]
    steps = [step for run in runs for step in run.steps]
    sections += [
        ("samples", "Samples", _samples([step for step in steps if step.samples])),
        ("time", "Time", _time(runs)),
        ("left-out", "Cut and left out", _left_out(steps, len(runs) > 1)),
        ("settings", "Settings", _settings(by_kind)),
    ]
    present = [(anchor, title, body) for anchor, title, body in sections if body]
    links = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title, _ in present)
    bodies = "".join(
        f'<section id="{anchor}"><h2>{escape(title)}</h2>{body}</section>' for anchor, title, body in present
    )
    name = (" and " if len(runs) == 2 else ", ").join(run.name for run in runs)
    paths = "".join(f'<p class="soft paths">{escape(str(run.path))}</p>' for run in runs)
    return document(
        name,
        STYLE,
        f"<header><h1>{escape(name)}</h1>{paths}<nav>{links}</nav>{_warnings(steps)}</header>"
        f"<main>{_headlines(runs, by_kind)}{bodies}</main>"
        f"<footer>Written {written:%Y-%m-%d %H:%M} by Threestep, from the files in the runs' folders.</footer>",
    )


def document(title: str, style: str, body: str) -> str:
    """A whole page: what a browser needs around `body`, and the policy that forbids scripts and requests."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Threestep</title><style>{style}</style></head><body>{body}</body></html>\n"
    )


def step_charts(runs: Sequence[ReportedRun]) -> dict[str, list[Chart]]:
    """Every chart of the report, by kind of step."""
    found = {}
    for kind, steps in _by_kind(runs).items():
        charts: list[Chart] = list(curves_of(steps))
        for step in steps:
            own: list[Chart] = [*score_charts(step), *sample_charts(step)]
            charts += [replace(chart, title=f"{chart.title}: {step.run}") if len(steps) > 1 else chart for chart in own]
        found[kind] = charts
    return found


def _by_kind(runs: Sequence[ReportedRun]) -> dict[str, list[StepRun]]:
    """Every step, by its kind, in the order of the steps."""
    found: dict[str, list[StepRun]] = {}
    for step in sorted((step for run in runs for step in run.steps), key=lambda step: step.place):
        found.setdefault(step.declaration.kind, []).append(step)
    return found


def _title(steps: Sequence[StepRun]) -> str:
    """Of steps of one kind, e.g. `Step 1: supervised fine-tuning`, or `Step 3: GRPO, PPO` for two variants."""
    declaration = steps[0].declaration
    titles = sorted({declaration.title_of(step.settings) for step in steps})
    title = f"Step {declaration.number}: {', '.join(titles)}" if declaration.number else titles[0]
    return title[0].upper() + title[1:]


def _warnings(steps: Sequence[StepRun]) -> str:
    sentences = [f"{step.path.name}: {problem}" for step in steps for problem in step.problems]
    unfinished = "has no summary.json: the run continues, or it was stopped before its end"
    sentences += [f"{step.path.name} {unfinished}" for step in steps if not step.summary]
    return "".join(f'<p class="warning">{escape(sentence)}</p>' for sentence in sentences)


# --- headline figures


def _headlines(runs: Sequence[ReportedRun], by_kind: dict[str, list[StepRun]]) -> str:
    if len(runs) == 1:
        tiles = "".join(_tile(*figure) for steps in by_kind.values() for step in steps for figure in headline(step))
        return f'<div class="tiles">{tiles}</div>' if tiles else ""
    rows: dict[str, dict[str, str]] = {}
    for steps in by_kind.values():
        for step in steps:
            for title, before, after, error in headline(step):
                rows.setdefault(title, {})[step.run] = _before_after(before, after, error)
    head = ["", *(run.name for run in runs)]
    body = [[title, *(found.get(run.name, "–") for run in runs)] for title, found in rows.items()]
    table = _table(head, body, numbers=range(1, len(head)))
    note = '<p class="soft">held-out figures before → after training (± standard error of the gain)</p>'
    return f'<div class="card scroll" style="margin-top:22px">{note}{table}</div>' if rows else ""


def _tile(title: str, before: float | None, after: float | None, error: float | None) -> str:
    value = shown(before) if after is None else f"<i>{shown(before)} →</i> {shown(after)}"
    under = f'<span class="soft">gain ± {shown(error)} (s.e.)</span>' if error is not None else ""
    return f'<div class="tile"><span class="soft">{escape(title)}</span><b>{value}</b>{under}</div>'


def _before_after(before: float | None, after: float | None, error: float | None) -> str:
    text = shown(before) if after is None else f"{shown(before)} → {shown(after)}"
    return text + (f" (± {shown(error)})" if error is not None else "")


# --- one kind of step


def _step_section(steps: Sequence[StepRun], charts: Sequence[Chart]) -> str:
    body = "".join(_figure(chart) for chart in charts)
    grid = f'<div class="charts">{body}</div>' if body else '<p class="soft">No metrics yet.</p>'
    return grid + "".join(_every_metric(step, len(steps) > 1) for step in steps)


def _figure(chart: Chart) -> str:
    drawn = draw(chart)
    if not drawn:
        return ""
    notes = [chart.note, *(_line_notes(chart) if isinstance(chart, LineChart) else [])]
    note = "; ".join(note for note in notes if note)
    caption = f"<h3>{escape(chart.title)}</h3>" + (f"<p>{escape(note)}</p>" if note else "")
    return f"<figure><figcaption>{caption}{_legend(chart)}</figcaption>{drawn}</figure>"


def _line_notes(chart: LineChart) -> list[str]:
    windows = sorted({line.window for line in chart.lines if line.window > 1})
    notes = [f"bold: mean of {' or '.join(str(window) for window in windows)} steps around"] if windows else []
    for line in chart.lines:
        gaps = len(line.points) - len(line.known)
        if gaps:
            notes.append(f"{line.label}: {gaps} value{'s' if gaps > 1 else ''} not finite")
    return notes


def _legend(chart: Chart) -> str:
    if isinstance(chart, LineChart):
        lines = [line for line in chart.lines if line.known]
        marks = [(line.label, line.colour, "dashed" if line.is_evaluation else "") for line in lines]
        marks = marks if len(marks) > 1 or marks[0][2] else []
    else:
        kinds = chart.counts if isinstance(chart, HistogramChart) else chart.clouds
        marks = [(label, place, "block") for place, (label, _) in enumerate(kinds)]
    items = "".join(f'<li><i class="c{colour % 8} {kind}"></i>{escape(label)}</li>' for label, colour, kind in marks)
    return f'<ul class="legend">{items}</ul>' if items else ""


def _every_metric(step: StepRun, several: bool) -> str:
    rows = "".join(
        f'<tr><td class="value metric">{escape(name)}{f" ({bad} not finite)" if bad else ""}</td>'
        + "".join(f'<td class="number">{shown(value)}</td>' for value in values)
        + f'<td class="c0">{sparkline(step.points(name))}</td></tr>'
        for name, values, bad in metric_rows(step)
    )
    if not rows:
        return ""
    head = "".join(f'<th class="number">{word}</th>' for word in ("first", "last", "least", "greatest"))
    return (
        f"<details><summary>Every metric{f' of {escape(step.run)}' if several else ''}</summary>"
        f'<div class="card scroll"><table><tr><th>metric</th>{head}<th></th></tr>{rows}</table></div></details>'
    )


# --- samples


def _samples(steps: Sequence[StepRun]) -> str:
    parts, why = [], ""
    for row in sampled_rows(steps):
        if row.why != why:
            why = row.why
            parts.append(f'<h3 style="margin-top:18px">{escape(why)}</h3>')
        truth = f'<p class="soft">expected: {escape(row.ground_truth)}</p>' if row.ground_truth else ""
        first: dict[str, SampledAnswer] = {}  # of each run: scores of different reward models cannot be compared
        answers = "".join(_answer(answer, first.setdefault(answer.run, answer)) for answer in row.answers)
        parts.append(
            f'<div class="card sample"><div class="text prompt" dir="auto">{escape(row.prompt)}</div>{truth}'
            f'<div class="answers">{answers}</div></div>'
        )
    if not parts:
        return ""
    declaration = steps[0].declaration
    before, after = declaration.sample_labels
    note = (
        f"Responses to held-out prompts before step {declaration.number} ({before}) and after it ({after}), "
        "from the same seed for each prompt."
    )
    return f'<p class="soft">{note}</p>{"".join(parts)}'


def _answer(answer: SampledAnswer, first: SampledAnswer) -> str:
    marks = []
    for name, value in answer.marks:
        before = dict(first.marks).get(name)
        better = value is not None and before is not None and name != "tokens" and value != before
        colour = f' class="{"good" if value > before else "bad"}"' if better else ""  # type: ignore[operator]
        marks.append(f"<span>{escape(name)} <b{colour}>{shown(value)}</b></span>")
    if not answer.ended:
        marks.append('<span class="bad">cut by the length limit</span>')
    return (
        f'<div class="answer"><p class="soft">{escape(answer.column)}</p>'
        f'<div class="text" dir="auto">{escape(answer.text.strip()) or "(empty)"}</div>'
        f'<div class="marks">{"".join(marks)}</div></div>'
    )


# --- time, what was left out, settings


def _time(runs: Sequence[ReportedRun]) -> str:
    blocks = []
    for run in runs:
        for step in run.steps:
            phases, total = phase_seconds(step)
            whole = run.summary.get(f"seconds_{step.declaration.kind}")  # all_steps writes it
            if isinstance(whole, (int, float)) and whole > total > 0:
                phases.append(("start-up, loading and saving", whole - total))
                total = float(whole)
            if not total:
                continue
            bars = "".join(
                f"<div>{escape(name)}<span>{duration(seconds)} · {seconds / total:.0%}</span>"
                f'<u><i style="width:{min(seconds / total, 1):.1%}"></i></u></div>'
                for name, seconds in phases
            )
            body = f'<p class="soft">{duration(total)} in all</p><div class="bars">{bars}</div>'
            blocks.append((_label(step, len(runs) > 1), body))
    return _blocks(blocks)


def duration(seconds: float) -> str:
    """E.g. 3.2 s, 4 min 05 s or 2 h 07 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _left_out(steps: Sequence[StepRun], several: bool) -> str:
    tables = [(_label(step, several), left_out(step)) for step in steps]
    return _blocks([(label, _table([], rows, numbers=())) for label, rows in tables if rows])


def _label(step: StepRun, several: bool) -> str:
    return f"{step.run}: {step.path.name}" if several and step.run != step.path.name else step.path.name


def _blocks(blocks: Sequence[tuple[str, str]]) -> str:
    """Cards of (title, body)."""
    cards = "".join(f'<div class="card"><h3>{escape(title)}</h3>{body}</div>' for title, body in blocks)
    return f'<div class="blocks">{cards}</div>' if cards else ""


def _settings(by_kind: dict[str, list[StepRun]]) -> str:
    parts = []
    for steps in by_kind.values():
        if not any(step.settings for step in steps):
            continue
        differ, same = settings_rows(steps)
        title = escape(_title(steps))
        if differ:
            table = _table(["setting", *(step.run for step in steps)], [(name, *values) for name, values in differ])
            parts.append(f'<div class="card scroll"><h3>{title}: what differs</h3>{table}</div>')
        if same:
            rest = _table([], [(name, values[0]) for name, values in same])
            word = "the same in all" if differ else f"{len(same)} settings"
            parts.append(f'<details><summary>{title}: {word}</summary><div class="card">{rest}</div></details>')
    return "".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] | range | None = None) -> str:
    """numbers: the columns of numbers; None: the columns after the first hold values as a file has them."""

    def classes(column: int) -> str:
        if column and numbers is None:
            return ' class="value"'
        return ' class="number"' if numbers and column in numbers else ""

    top = "".join(f"<th{classes(column)}>{escape(word)}</th>" for column, word in enumerate(head))
    body = "".join(
        f"<tr>{''.join(f'<td{classes(column)}>{escape(cell)}</td>' for column, cell in enumerate(row))}</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>"
