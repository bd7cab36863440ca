"""The page of best of n, in the form of the report: the curve as charts and as a table, and the first prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from threestep.plugins.report.figures.charts import ChartLine, LineChart
from threestep.plugins.report.figures.drawing import drawing_of
from threestep.plugins.report.figures.numbers import shown
from threestep.plugins.report.figures.tables import clipped, text_of
from threestep.plugins.report.pages.document import direction, document, scrolled, table
from threestep.plugins.report.pages.page import chart_figure
from threestep.plugins.report.pages.script import PACKAGE, SCRIPT, library

if TYPE_CHECKING:
    from threestep.plugins.evaluation.best_of.curve import CurvePoint

_SHOWN_PROMPTS = 20


def best_of_page(
    title: str,
    sentences: tuple[str, ...],
    curve: Sequence[CurvePoint],
    cells: tuple[Sequence[str], Sequence[Sequence[str]]],
    *,
    drawn: Sequence[Mapping[str, Any]],
) -> str:
    """sentences: a warning, or "", and others. cells: the head and the rows of the curve's table. drawn: prompts with
    their responses."""
    d3, charts = library(), {f"curve-{place}": chart for place, chart in enumerate(charts_of(curve))}
    warning, *others = sentences
    paragraphs = f'<p class="warning">{escape(warning)}</p>' if warning else ""
    paragraphs += "".join(f"<p>{escape(sentence)}</p>" for sentence in others)
    if d3:
        figures = "".join(chart_figure(name, chart) for name, chart in charts.items())
    else:
        figures = f'<p class="warning">Charts are missing because the package {PACKAGE} is not installed.</p>'
    prompts = "".join(_prompt(prompt) for prompt in drawn[:_SHOWN_PROMPTS])
    return document(
        title,
        f"<header><h1>{escape(title)}</h1>{paragraphs}</header><main>"
        f'<section id="curve"><h2>Scores by n</h2><div class="charts">{figures}</div>'
        f"{scrolled(table(*cells, numbers=range(len(cells[0]))), 'the curve')}</section>"
        f'<section id="responses"><h2>The first prompts</h2>{prompts}</section></main>'
        "<footer>Written by threestep evaluate best_of.</footer>",
        ".charts { margin-bottom: 14px; }",
        scripts=(d3, SCRIPT) if d3 else (),
        data={"charts": {name: drawing_of(chart) for name, chart in charts.items()}} if d3 else None,
    )


def charts_of(curve: Sequence[CurvePoint]) -> list[LineChart]:
    """The reward with its interval against n and, of a checker, its scores of the pick and of its own best."""

    def line(label: str, values: Sequence[float], colour: int, dashed: bool = False) -> ChartLine:
        points = list(zip((point.k for point in curve), values, strict=True))
        return ChartLine(label, points, colour, is_evaluation=dashed, is_smooth=True)

    rewards = [point.reward for point in curve]
    lines = [
        line("reward", [figure.value for figure in rewards], 0),
        line("95 % from", [figure.low for figure in rewards], 0, True),
        line("to", [figure.high for figure in rewards], 0, True),
    ]
    charts = [LineChart("Reward of the best of n", tuple(lines), "mean over prompts", x_label="n")]
    checks = [point.check for point in curve if point.check is not None]
    bests = [point.best_check for point in curve if point.best_check is not None]
    if checks:
        lines = [
            line("response that the reward picks", [figure.value for figure in checks], 1),
            line("95 % from", [figure.low for figure in checks], 1, True),
            line("to", [figure.high for figure in checks], 1, True),
            line("response that the checker picks", [figure.value for figure in bests], 2),
        ]
        charts.append(LineChart("Checker's score", tuple(lines), "falls if the reward is over-optimized", x_label="n"))
    return charts


def _prompt(prompt: Mapping[str, Any]) -> str:
    """A prompt with its best and its worst response."""
    rewards = prompt["reward"]
    order = sorted(range(len(rewards)), key=lambda place: -rewards[place])
    pair = [("best", order[0])] + ([("worst", order[-1])] if len(order) > 1 else [])
    answers = "".join(
        f'<div class="answer"><p class="soft">{name}, reward {shown(rewards[place])}{_marks(prompt, place)}</p>'
        f'<div class="text" dir="{direction(str(prompt["responses"][place]))}" tabindex="0">'
        f"{_safe(prompt['responses'][place]) or '(empty)'}</div></div>"
        for name, place in pair
    )
    return (
        f'<div class="card sample"><div class="text prompt" dir="auto" tabindex="0">{_safe(prompt["prompt"])}</div>'
        f'<div class="answers">{answers}</div></div>'
    )


def _marks(prompt: Mapping[str, Any], place: int) -> str:
    check = f", checker {shown(prompt['check'][place])}" if "check" in prompt else ""
    return check + ("" if prompt["ended"][place] else ", cut")


def _safe(text: Any) -> str:
    return escape(clipped(text_of(text)).strip())
