"""An evaluation as lines to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from training.utils.preference.evaluation import PERCENTILES, LengthBucket, RewardEvaluation, decimals

_BAR_CHARACTERS = 40


def report_text(evaluation: RewardEvaluation) -> str:
    """The figures, the spread of the scores, accuracy by length, calibration and a histogram."""
    parts = [_figures(evaluation), _spreads(evaluation)]
    if evaluation.pairs:
        parts += [_lengths(evaluation), _calibration(evaluation)]
    return "\n\n".join([*parts, *_histogram(evaluation)])


def _figures(evaluation: RewardEvaluation) -> str:
    return (
        f"{evaluation.pairs:,} pairs from {evaluation.prompts:,} prompts: accuracy {decimals(evaluation.accuracy)} "
        f"({evaluation.ties:,} ties), mean score gap {decimals(evaluation.score_gap)}, loss "
        f"{decimals(evaluation.loss)}"
    )


def _spreads(evaluation: RewardEvaluation) -> str:
    rows = [
        [label, f"{one.count:,}", *(decimals(value) for value in (one.mean, one.std, *one.percentiles.values()))]
        for label, one in (("chosen", evaluation.chosen), ("rejected", evaluation.rejected))
        if one is not None
    ]
    return _table(["scores", "count", "mean", "std", *(f"p{percent}" for percent in PERCENTILES)], rows)


def _lengths(evaluation: RewardEvaluation) -> str:
    rows = [[_bounds(one), f"{one.pairs:,}", decimals(one.accuracy)] for one in evaluation.by_length]
    return _table(["extra tokens in the better response", "pairs", "accuracy"], rows)


def _bounds(bucket: LengthBucket) -> str:
    if bucket.least is None:
        return f"{bucket.most} or less"
    if bucket.most is None:
        return f"{bucket.least} or more"
    return str(bucket.least) if bucket.least == bucket.most else f"{bucket.least} to {bucket.most}"


def _calibration(evaluation: RewardEvaluation) -> str:
    rows = [
        [f"{one.least:.2f} to {one.most:.2f}", f"{one.pairs:,}", decimals(one.predicted), decimals(one.right)]
        for one in evaluation.calibration
    ]
    table = _table(["predicted probability", "pairs", "mean", "correct"], rows)
    return f"{table}\nexpected calibration error {decimals(evaluation.calibration_error)}"


def _histogram(evaluation: RewardEvaluation) -> list[str]:
    bins = evaluation.histogram
    most = max([*bins.chosen, *bins.rejected, 1])

    def bar(count: int) -> str:
        return "#" * -(-count * _BAR_CHARACTERS // most)

    rows = [
        [f"{edge:.3f}", f"{chosen:,}", f"{rejected:,}", f"{bar(chosen):<{_BAR_CHARACTERS}} | {bar(rejected)}".rstrip()]
        for edge, chosen, rejected in zip(bins.edges, bins.chosen, bins.rejected, strict=False)
    ]
    return [_table(["scores from", "chosen", "rejected", "chosen | rejected"], rows, left=(3,))] if rows else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
