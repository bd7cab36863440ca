"""The files of a finished run of best of n, and what it prints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.evaluation.best_of.curve import CurvePoint, curve_of, over_optimised
from threestep.plugins.evaluation.best_of.kept import Kept, kept_rows
from threestep.plugins.evaluation.best_of.page import best_of_page
from threestep.plugins.evaluation.best_of.store import write_rows
from threestep.plugins.report.figures.numbers import shown
from training.utils.base.console import counted
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import replace_file
from training.utils.run.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threestep.plugins.evaluation.best_of.arguments import BestOfArguments
    from threestep.plugins.evaluation.best_of.store import Drawn
    from threestep.plugins.evaluation.opening import Evaluated
    from training.utils.rewards.figures import Figure

ROWS, PAGE, FIGURES = "rows.jsonl", "best_of.html", "best_of.json"
HEAD = ("n", "KL at most", "reward (95 %)", "checker, reward's pick", "checker, own pick")
_REASONS = {
    "cut_or_empty": "because all their responses are empty or cut off by --max_new_tokens",
    "below_min_reward": "because none of their responses reaches --min_reward",
}


def write_results(drawn: Sequence[Drawn], flags: Evaluated, wanted: BestOfArguments) -> list[str]:
    """Write rows, page and figures, and return the lines to print. ThreestepError if no response is kept."""
    folder, kept = Path(flags.run.output_dir), kept_rows(drawn, wanted)
    curve = curve_of(drawn, flags.run.seed)
    warning = over_optimised(drawn, curve, flags.run.seed)
    write_rows(folder / ROWS, kept.rows)
    title = f"best of {wanted.num_samples_per_prompt} on {' '.join(flags.data.source.data_path)}"
    head, *cells = table_rows(curve)
    page = best_of_page(title, (warning, *_sentences(drawn, kept)), curve, (head, cells), drawn=drawn)
    replace_file(folder / PAGE, page)
    figures = {
        "model": wanted.model_name_or_path,
        "data_path": flags.data.source.data_path,
        "split": wanted.split,
        "reward": flags.reward.reward,
        "reward_model": wanted.reward_model,
        "checker": wanted.checker,
        "prompts": len(drawn),
        "rows": len(kept.rows),
        "pairs": kept.pairs,
        "left_out": dict(kept.left_out),
        "over_optimised": bool(warning),
        "curve": [asdict(point) for point in curve],
    }
    RunFolder(folder, is_main_rank=True).write_json(FIGURES, figures)
    if not kept.rows:
        raise ThreestepError(f"no response was kept: {'; '.join(_sentences(drawn, kept)[1:])}; {_remedy(kept)}")
    sentences = [*_as_text(curve), *([warning] if warning else []), *_sentences(drawn, kept)]
    return [*sentences, f"written to {folder}: {ROWS}, {PAGE}, {FIGURES}, answers.jsonl"]


def table_rows(curve: Sequence[CurvePoint]) -> list[tuple[str, ...]]:
    """The curve as cells, a head first; of a checker only if there is one."""

    def cell(figure: Figure | None) -> str:
        return "" if figure is None else f"{shown(figure.value)} ({shown(figure.low)} to {shown(figure.high)})"

    rows = [
        (str(point.k), f"{point.kl:.3f}", cell(point.reward), cell(point.check), cell(point.best_check))
        for point in curve
    ]
    return [row if curve[0].check is not None else row[:3] for row in (HEAD, *rows)]


def _as_text(curve: Sequence[CurvePoint]) -> list[str]:
    rows = table_rows(curve)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _sentences(drawn: Sequence[Drawn], kept: Kept) -> list[str]:
    responses = sum(len(prompt["responses"]) for prompt in drawn)
    sentences = [
        f"{counted(len(kept.rows), 'row')} from {counted(len(drawn), 'prompt')} with {counted(responses, 'response')}; "
        f"{counted(kept.pairs, 'row')} {'is a pair' if kept.pairs == 1 else 'are pairs'}"
    ]
    return sentences + [f"{count:,} prompts left out {_REASONS[reason]}" for reason, count in kept.left_out.items()]


def _remedy(kept: Kept) -> str:
    remedies: dict[str, Any] = {
        "cut_or_empty": "raise --max_new_tokens, or add --keep_cut",
        "below_min_reward": "lower --min_reward",
    }
    return ", or ".join(remedies[reason] for reason in kept.left_out)
