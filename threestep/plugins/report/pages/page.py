"""The report as one HTML page, and as parts that a live page replaces one by one.

What a model wrote is untrusted: every text passes through `escape`, and the page's policy runs the report's script
alone.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from threestep.plugins.report.figures.charts import Chart, HistogramChart, LineChart
from threestep.plugins.report.figures.course import when
from threestep.plugins.report.figures.drawing import COLOURS, drawing_of, in_words, known_lines
from threestep.plugins.report.figures.figures import curves_of, phase_seconds, sample_charts, score_charts
from threestep.plugins.report.figures.gaming_figures import gaming_of
from threestep.plugins.report.figures.numbers import duration, shown, shown_together, sparkline
from threestep.plugins.report.figures.outcome import (
    HeadlineFigure,
    best_step,
    fallen_sentence,
    headline,
    worse_sentence,
)
from threestep.plugins.report.figures.overview import changed_settings, facts_of
from threestep.plugins.report.figures.tables import evaluations, harness_rows, left_out, metric_rows, settings_rows
from threestep.plugins.report.pages.document import document, scrolled, table, tile_grid, with_flags
from threestep.plugins.report.pages.gaming_section import TITLE, gaming_section
from threestep.plugins.report.pages.samples_section import first_sample, samples_section
from threestep.plugins.report.pages.script import PACKAGE, SCRIPT, library

if TYPE_CHECKING:
    from threestep.plugins.report.figures.reading import ReportedRun, StepRun

_NO_SCRIPT = (
    '<noscript><p class="warning">The charts need JavaScript; the figures under "Every metric" do not.</p></noscript>'
)


@dataclass(frozen=True)
class PageParts:
    """The parts of a page. sections: (anchor, title) in order; html: of each part, by its name: "results" and the
    sections; drawings: the script's data for each chart, by its id."""

    sections: tuple[tuple[str, str], ...]
    html: dict[str, str]
    drawings: dict[str, dict[str, Any]]


def page(runs: Sequence[ReportedRun], written: datetime.datetime, live: dict[str, Any] | None = None) -> str:
    """Return the whole report of the runs. live: values that the script needs to follow a run (`live.py`)."""
    parts = parts_of(runs)
    d3 = library()
    links = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title in parts.sections)
    bodies = "".join(
        f'<section id="{anchor}"><h2>{escape(title)}</h2>{_part(anchor, parts)}</section>'
        for anchor, title in parts.sections
    )
    name = _names(runs)
    missing = (
        f"The charts are missing because the package {PACKAGE} was not installed when this page was written; run "
        f"pip install {PACKAGE}"
    )
    warning = _NO_SCRIPT if d3 else f'<p class="warning">{missing}</p>'
    following = '<p class="soft" id="following">live</p>' if live else ""
    source = "as they grow" if live else f"Written {written:%Y-%m-%d %H:%M}"
    footer = f"{source} by Threestep, from the files in the runs' folders."
    return document(
        name,
        f"<header><h1>{escape(name)}</h1>{following}{warning}{_part('results', parts)}<nav>{links}</nav></header>"
        f"<main>{bodies}</main>"
        f"<footer>{footer[0].upper() + footer[1:]}</footer>",
        scripts=(d3, SCRIPT) if d3 else (),
        data={"charts": parts.drawings, **({"live": live} if live else {})} if d3 else None,
    )


def parts_of(runs: Sequence[ReportedRun]) -> PageParts:
    """The runs' figures as HTML and as drawings, from what was read."""
    by_kind = _by_kind(runs)
    steps = [step for run in runs for step in run.steps]
    sections: list[tuple[str, str, str]] = []
    drawings: dict[str, dict[str, Any]] = {}
    for (kind, own), charts in zip(by_kind.items(), step_charts(runs).values(), strict=True):
        drawn = {f"{kind}-{place}": (chart, drawing_of(chart)) for place, chart in enumerate(charts)}
        known = {name: (chart, drawing) for name, (chart, drawing) in drawn.items() if drawing is not None}
        drawings |= {name: drawing for name, (chart, drawing) in known.items() if not in_words(chart)}
        sections.append((kind, _title(own), _step_section(own, {name: chart for name, (chart, _) in known.items()})))
    gaming, curves = gaming_parts(steps)
    drawings |= curves
    sections += [
        ("gaming", TITLE, gaming),
        ("benchmarks", "Benchmarks", _benchmarks(steps)),
        ("samples", "Samples", samples_section(steps)),
        ("time", "Time", _time(runs)),
        ("left-out", "Cut and left out", _left_out(steps, len(runs) > 1)),
        ("run", "What was run", _facts(runs)),
        ("settings", "Settings", _settings(runs, by_kind)),
    ]
    present = [(anchor, title, body) for anchor, title, body in sections if body]
    html = {"results": _results(runs, by_kind)}
    html |= {anchor: body for anchor, _, body in present}
    return PageParts(tuple((anchor, title) for anchor, title, _ in present), html, drawings)


def gaming_parts(steps: Sequence[StepRun]) -> tuple[str, dict[str, dict[str, Any]]]:
    """HTML of the section on gamed rewards, and the drawings of its curves."""
    found = [figures for step in steps if (figures := gaming_of(step)) is not None]
    charts: list[str] = []
    drawings: dict[str, dict[str, Any]] = {}
    for place, figures in enumerate(found):
        name, drawing = f"gaming-{place}", drawing_of(figures.curve) if figures.curve else None
        charts.append(chart_figure(name, figures.curve) if figures.curve and drawing else "")
        drawings |= {name: drawing} if drawing else {}
    return gaming_section(found, charts), drawings


def _part(name: str, parts: PageParts) -> str:
    return f'<div data-part="{name}">{parts.html[name]}</div>'


def _names(runs: Sequence[ReportedRun]) -> str:
    return (" and " if len(runs) == 2 else ", ").join(run.name for run in runs)


def step_charts(runs: Sequence[ReportedRun]) -> dict[str, list[Chart]]:
    """Every chart of the report, by kind of step."""
    by_kind = {}
    for kind, steps in _by_kind(runs).items():
        charts: list[Chart] = list(curves_of(steps))
        for step in steps:
            new: list[Chart] = [*score_charts(step), *sample_charts(step)]
            charts += [replace(chart, title=f"{chart.title}: {step.run}") if len(steps) > 1 else chart for chart in new]
        by_kind[kind] = charts
    return by_kind


def _by_kind(runs: Sequence[ReportedRun]) -> dict[str, list[StepRun]]:
    """Every step, by its kind, in the order of the runs and of their steps."""
    by_kind: dict[str, list[StepRun]] = {}
    for step in (step for run in runs for step in run.steps):
        by_kind.setdefault(step.declaration.kind, []).append(step)
    return by_kind


def _title(steps: Sequence[StepRun]) -> str:
    """Title of steps of one kind, e.g. `Step 1: supervised fine-tuning`, or `Step 3: GRPO, PPO` for two variants."""
    declaration = steps[0].declaration
    titles = sorted({declaration.title_of(step.settings) for step in steps})
    title = f"Step {declaration.number}: {', '.join(titles)}" if declaration.number else titles[0]
    return title[0].upper() + title[1:]


def _warnings(steps: Sequence[StepRun]) -> str:
    sentences = [f"{step.path.name}: {problem}" for step in steps for problem in step.problems]
    several = len({step.run for step in steps}) > 1
    for step in steps:
        for sentence in filter(None, (worse_sentence(step), fallen_sentence(step))):
            label = step.label
            name = _label(step, True) if several else label[0].upper() + label[1:]
            sentences.append(f"{name}: {sentence}")
    unfinished = "has no summary.json: the run is not finished, or it was stopped early"
    sentences += [f"{step.path.name} {unfinished}" for step in steps if not step.summary]
    return "".join(f'<p class="warning">{with_flags(sentence)}</p>' for sentence in sentences)


# --- the top: what came out


def _results(runs: Sequence[ReportedRun], by_kind: dict[str, list[StepRun]]) -> str:
    """The first screen of a phone: the run in a line, warnings, held-out figures, a sample; of several runs also the
    settings that differ."""
    steps = [step for run in runs for step in run.steps]
    facts = dict(facts_of(runs[0])) if len(runs) == 1 else {}
    known = [facts[name] for name in ("Model", "Data", "Duration") if name in facts]
    line = " · ".join([*map(_title, by_kind.values()), *known]) if len(runs) == 1 else f"{len(runs)} runs, compared"
    return (
        (f'<p class="soft">{escape(line)}</p>' if line else "")
        + _warnings(steps)
        + _headlines(runs, by_kind)
        + (_differences(by_kind) if len(runs) > 1 else "")
        + first_sample(steps)
    )


def _facts(runs: Sequence[ReportedRun]) -> str:
    facts = [dict(facts_of(run)) for run in runs]
    names = list(dict.fromkeys(name for of_run in facts for name in of_run))
    if not names:
        return ""
    if len(runs) > 1:
        rows = [[name, *(of_run.get(name, "–") for of_run in facts)] for name in names]
        return scrolled(table(["", *(run.name for run in runs)], rows, numbers=()), "the runs")
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(facts[0][name])}</dd>" for name in names)
    return f'<dl class="card facts">{lines}</dl>'


def _differences(by_kind: dict[str, list[StepRun]]) -> str:
    parts = []
    for steps in by_kind.values():
        differ, _ = settings_rows(steps)
        if differ:
            rows = table(["setting", *(step.run for step in steps)], [(name, *values) for name, values in differ])
            title = f"{_title(steps)}: what differs"
            parts.append(scrolled(f'<h2 class="small">{escape(title)}</h2>{rows}', title))
    return "".join(parts)


# --- headline figures


def _headlines(runs: Sequence[ReportedRun], by_kind: dict[str, list[StepRun]]) -> str:
    if len(runs) == 1:
        boxes = [_tile(figure) for steps in by_kind.values() for step in steps for figure in headline(step)]
        title = '<p class="soft above">Held-out figures, before → after training</p>' if boxes else ""
        return title + tile_grid(boxes)
    rows: dict[str, dict[str, str]] = {}
    for steps in by_kind.values():
        for step in steps:
            for figure in headline(step):
                rows.setdefault(figure.title, {})[step.run] = _before_after(figure)
    head = ["", *(run.name for run in runs)]
    body = [[title, *(values.get(run.name, "–") for run in runs)] for title, values in rows.items()]
    note = '<p class="soft">Held-out figures, before → after training (gain ± its standard error)</p>'
    figures = note + table(head, body, numbers=())  # which may wrap: a phone shows two runs
    return scrolled(figures, "held-out figures") if rows else ""


def _tile(figure: HeadlineFigure) -> str:
    before, after = shown_together(figure.before, figure.after)
    value = before if figure.after is None else f"<i>{before} →</i> {after}"
    under = f'<span class="note soft">{escape(figure.meaning)}</span>' if figure.meaning else ""
    gain = _gain(figure)
    under += f'<span class="note">gain {gain} (standard error)</span>' if gain else ""
    kind = "bad" if figure.got_worse else "soft"
    under += f'<span class="note {kind}">{escape(figure.note)}</span>' if figure.note else ""
    return f'<div class="tile"><span class="soft">{escape(figure.title)}</span><b>{value}</b>{under}</div>'


def _gain(figure: HeadlineFigure) -> str:
    """The gain and its standard error, to two digits of the error; "" without one."""
    before, after, error = figure.before, figure.after, figure.error
    if before is None or after is None or error is None:
        return ""
    decimals = min(max(1 - math.floor(math.log10(error)), 0), 6) if error else 4
    return f"{after - before:+.{decimals}f} ± {error:.{decimals}f}"


def _before_after(figure: HeadlineFigure) -> str:
    (before, after), gain = shown_together(figure.before, figure.after), _gain(figure)
    text = before if figure.after is None else f"{before} → {after}"
    notes = ([f"gain {gain}"] if gain else []) + ([figure.note] if figure.note else [])
    return text + (f" ({'; '.join(notes)})" if notes else "")


# --- one kind of step


def _step_section(steps: Sequence[StepRun], charts: dict[str, Chart]) -> str:
    drawn = {name: chart for name, chart in charts.items() if not in_words(chart)}
    body = "".join(chart_figure(name, chart) for name, chart in drawn.items())
    zooms = any(isinstance(chart, LineChart) for chart in drawn.values())
    grid = f'{_TOOLS if zooms else ""}<div class="charts">{body}</div>' if body else ""
    said = "".join(
        f"<p><b>{escape(chart.title)}</b>{escape(f' ({chart.note})' if chart.note else '')}: {escape(words)}</p>"
        for chart in charts.values()
        if (words := in_words(chart))
    )
    sentences = f'<div class="card sentences">{said}</div>' if said else ""
    tables = "".join(_every_evaluation(step, len(steps) > 1) + _every_metric(step, len(steps) > 1) for step in steps)
    return (grid + sentences or '<p class="soft">No metrics yet.</p>') + tables


_TOOLS = (
    '<div class="tools" role="group" aria-label="Steps that the charts show">'
    '<button type="button" data-zoom="0.5" aria-label="zoom in">+</button>'
    '<button type="button" data-zoom="2" aria-label="zoom out">−</button>'
    '<button type="button" data-zoom="all">all steps</button>'
    '<span class="soft">drag over a chart to zoom; double-click shows all; legends have the last values, or those '
    "at the pointer</span></div>"
)


def chart_figure(name: str, chart: Chart) -> str:
    """A chart as the element that the script draws in."""
    notes = [chart.note, *(_line_notes(chart) if isinstance(chart, LineChart) else [])]
    note = "; ".join(note for note in notes if note)
    kind = "lines" if isinstance(chart, LineChart) else "other"
    log = '<button type="button" data-log aria-pressed="false">log scale</button>' if _may_be_log(chart) else ""
    caption = f'<div class="title"><h3>{escape(chart.title)}</h3><span class="where soft"></span>{log}</div>' + (
        f"<p>{escape(note)}</p>" if note else ""
    )
    focus = f'tabindex="0" role="group" aria-label="{escape(chart.title)}: arrow keys move, + and - zoom"'
    return (
        f'<figure data-chart="{name}" data-kind="{kind}"><figcaption>{caption}{_legend(chart)}</figcaption>'
        f'<div class="plot" {focus if kind == "lines" else ""}></div></figure>'
    )


def _may_be_log(chart: Chart) -> bool:
    """True if most of its values have a logarithm."""
    if not isinstance(chart, LineChart):
        return False
    values = [value for line in chart.lines for _, value in line.known]
    return sum(value > 0 for value in values) > len(values) / 2


def _line_notes(chart: LineChart) -> list[str]:
    windows = sorted({line.window for line in chart.lines if line.window > 1})
    marked = [line for line in chart.lines if line.marked]
    bests = {line.best or 0 for line in marked}
    notes = [f"bold: mean over {' or '.join(str(window) for window in windows)} neighboring steps"] if windows else []
    named = " or ".join(sorted({line.best_by for line in marked}))
    notes += [f"ring: the best held-out {named}{f', {when(*bests)}' if len(bests) == 1 else ''}"] if marked else []
    for line in chart.lines:
        gaps = len(line.points) - len(line.known)
        if gaps:
            notes.append(f"{line.label}: {gaps} value{'s' if gaps > 1 else ''} not finite")
    return notes


def _legend(chart: Chart) -> str:
    """Each line as a button that switches it off, with its value at the pointer, which the script fills in."""
    if isinstance(chart, LineChart):
        marks = [(line.label, line.colour, "dashed" if line.is_evaluation else "") for line in known_lines(chart)]
    else:
        kinds = chart.counts if isinstance(chart, HistogramChart) else chart.clouds
        marks = [(label, place, "block") for place, (label, _) in enumerate(kinds)]
    switches = isinstance(chart, LineChart) and len(marks) > 1
    items = "".join(
        f"<li>{_switch(place, mark) if switches else _swatch(mark)}</li>" for place, mark in enumerate(marks)
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def _swatch(mark: tuple[str, int, str]) -> str:
    label, colour, kind = mark
    return f'<i class="c{colour % COLOURS} {kind}"></i><span>{escape(label)}</span> <b></b>'


def _switch(place: int, mark: tuple[str, int, str]) -> str:
    return f'<button type="button" data-line="{place}" aria-pressed="true">{_swatch(mark)}</button>'


def _every_evaluation(step: StepRun, several: bool) -> str:
    """The evaluations in a table, the best of them marked."""
    metrics, rows = evaluations(step)
    if not rows:
        return ""
    best = best_step(step)
    head = "".join(f'<th class="number">{escape(name.removeprefix("eval/"))}</th>' for name in metrics)
    best_row, best_mark = '<tr class="chosen"><td>', " (best)"
    body = "".join(
        f"{best_row if at == best else '<tr><td>'}{at:,}{best_mark if at == best else ''}</td>"
        + "".join(f'<td class="number">{shown(value)}</td>' for value in values)
        + "</tr>"
        for at, values in rows
    )
    title = f"Every evaluation{f' of {step.run}' if several else ''}" + (
        f": the best is {when(best)}" if best is not None else ""
    )
    figures = scrolled(f"<table><tr><th>step</th>{head}</tr>{body}</table>", title)
    return f"<details><summary>{escape(title)}</summary>{figures}</details>"


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
    title = f"Every metric of {_label(step, several)}"
    figures = scrolled(f"<table><tr><th>metric</th>{head}<td></td></tr>{rows}</table>", title)
    return f"<details><summary>{escape(title)}</summary>{figures}</details>"


# --- time, what was left out, settings


def _time(runs: Sequence[ReportedRun]) -> str:
    blocks = []
    for run in runs:
        for step in run.steps:
            phases, total = phase_seconds(step)
            whole = run.summary.get(f"seconds_{step.declaration.kind}")  # all_steps writes it
            if isinstance(whole, (int, float)) and whole > total > 0:
                phases.append(("startup, loading and saving", whole - total))
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


def _benchmarks(steps: Sequence[StepRun]) -> str:
    """Figures of lm-evaluation-harness."""
    rows = [[_label(step, True), *row] for step in steps for row in harness_rows(step)]
    head = ["model", "task", "metric", "value ± s.e.", "rows", "examples", "chat template", "lm_eval"]
    return scrolled(table(head, rows, numbers=range(3, 6)), "benchmarks") if rows else ""


def _left_out(steps: Sequence[StepRun], several: bool) -> str:
    tables = [(_label(step, several), left_out(step)) for step in steps]
    return _blocks([(label, table([], rows, numbers=())) for label, rows in tables if rows])


def _label(step: StepRun, several: bool) -> str:
    return f"{step.run}: {step.path.name}" if several and step.run != step.path.name else step.path.name


def _blocks(blocks: Sequence[tuple[str, str]]) -> str:
    """Cards of (title, body)."""
    cards = "".join(f'<div class="card"><h3>{escape(title)}</h3>{body}</div>' for title, body in blocks)
    return f'<div class="blocks">{cards}</div>' if cards else ""


def _settings(runs: Sequence[ReportedRun], by_kind: dict[str, list[StepRun]]) -> str:
    """Those that are not defaults, and every resolved value; for several runs those that are the same, as the others
    stand at the top."""
    parts = []
    for steps in by_kind.values():
        changed = changed_settings(steps[0]) if len(runs) == 1 else []
        if changed:
            items = "".join(
                f'<li title="default: {escape(default)}"><span>{escape(name)}</span> <b>{escape(value)}</b></li>'
                for name, value, default in changed
            )
            title = f"{_title(steps)}: {len(changed)} setting{'s' if len(changed) > 1 else ''} changed"
            body = f'<div class="card"><ul class="set">{items}</ul></div>'
            parts.append(f"<details><summary>{escape(title)}</summary>{body}</details>")
        differ, same = settings_rows(steps)
        if same:
            rest = table([], [(name, values[0]) for name, values in same])
            word = "the same in all" if differ else f"all {len(same)} settings"
            title = f"{_title(steps)}: {word}"
            parts.append(f'<details><summary>{escape(title)}</summary><div class="card">{rest}</div></details>')
    return "".join(parts)
