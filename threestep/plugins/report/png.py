"""The report's charts as PNG files, for papers and slides. Only this module loads matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.report.figures.charts import Chart, HistogramChart, LineChart, ScatterChart, running_mean
from threestep.plugins.report.figures.drawing import in_words
from threestep.plugins.report.figures.gaming_figures import gaming_of
from threestep.plugins.report.figures.reading import ReportedRun, read_runs
from threestep.plugins.report.pages.page import step_charts
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#2a78d6", "#d9622b", "#179267", "#a4561f", "#c04f86", "#5f7a12", "#5a48b5", "#b3372f")
_INCHES, _DOTS_PER_INCH = (6.0, 3.6), 160


def write_pngs(folders: Sequence[str | Path], out: Path) -> Iterator[Path]:
    """Write each chart of the runs in `folders` to a PNG in `out`; yield the files. ThreestepError if a folder holds no
    run, or `out` cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, chart in named_charts(read_runs(folders)):
            path = out / f"{name}.png"
            _drawn(chart).savefig(path, dpi=_DOTS_PER_INCH)
            yield path
    except OSError as problem:
        raise ThreestepError(f"cannot write charts to {out}: {problem.strerror}") from problem


def first_chart(folder: str | Path) -> tuple[str, bytes] | None:
    """The title and the PNG of a run's first chart; None if it has none. ThreestepError if the folder holds no run."""
    chart = next((chart for _, chart in named_charts(read_runs([folder]))), None)
    if chart is None:
        return None
    content = io.BytesIO()
    _drawn(chart).savefig(content, format="png", dpi=_DOTS_PER_INCH)
    return chart.title, content.getvalue()


def _drawn(chart: Chart) -> Figure:
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    figure = Figure(figsize=_INCHES, layout="constrained")
    _draw(chart, figure.subplots())
    return figure


def named_charts(runs: Sequence[ReportedRun]) -> list[tuple[str, Chart]]:
    """(file name without its ending, chart) of everything the report draws; not of one or two values."""
    by_name: dict[str, Chart] = {}
    gaming = [found.curve for run in runs for step in run.steps if (found := gaming_of(step)) and found.curve]
    by_kind: dict[str, Sequence[Chart]] = {**step_charts(runs), "gaming": gaming}
    for kind, charts in by_kind.items():
        for chart in charts:
            if in_words(chart):
                continue
            name = re.sub(r"[^a-z0-9]+", "_", f"{kind} {chart.title}".lower()).strip("_")[:100]
            while name in by_name:
                name += "_"
            by_name[name] = chart
    return list(by_name.items())


def _draw(chart: Chart, axes: Any) -> None:
    if isinstance(chart, LineChart):
        _lines(chart, axes)
    elif isinstance(chart, HistogramChart):
        for place, ((label, _), shares) in enumerate(zip(chart.counts, chart.shares, strict=True)):
            axes.stairs(shares, chart.edges, fill=True, alpha=0.35, color=_COLOURS[place % 8], label=_plain(label))
        axes.set_ylabel("% of each")
    elif isinstance(chart, ScatterChart):
        for place, (label, cloud) in enumerate(chart.clouds):
            xs, ys = zip(*cloud, strict=True) if cloud else ((), ())
            axes.scatter(xs, ys, s=9, alpha=0.55, color=_COLOURS[place % 8], label=_plain(label))
        axes.set_ylabel(_plain(chart.y_label))
    axes.set_xlabel(_plain(chart.x_label))
    axes.set_title(_plain(chart.title), loc="left", fontweight="bold")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, fontsize="small")


def _lines(chart: LineChart, axes: Any) -> None:
    for line in chart.lines:
        colour = _COLOURS[line.colour % 8]
        xs, ys = [x for x, _ in line.points], [float("nan") if y is None else y for _, y in line.points]
        dashes = "--" if len(line.known) > 2 else ""  # nothing is known between only two evaluations
        style: dict[str, Any] = {"linestyle": dashes, "marker": "o", "markersize": 4} if line.is_evaluation else {}
        if line.window > 1:
            axes.plot(xs, ys, color=colour, alpha=0.3, linewidth=0.8)
            mean = running_mean(line.points, line.window)
            xs, ys = [x for x, _ in mean], [y for _, y in mean]
        axes.plot(xs, ys, color=colour, label=_plain(line.label), **style)
        if line.marked:
            axes.plot(*line.marked, color=colour, marker="o", markersize=10, fillstyle="none", linestyle="")
    axes.set_ylabel(_plain(chart.note), fontsize="small")


def _plain(text: str) -> str:
    """matplotlib reads text between dollar signs as mathematics, and hides labels that begin with _."""
    return text.replace("$", r"\$").lstrip("_")
