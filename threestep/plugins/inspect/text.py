"""An account as lines for a terminal, and as JSON values."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from threestep.plugins.inspect.account import Account, PhaseAccount, ShownRow, SourceAccount, in_words
from threestep.plugins.inspect.views import Style, histogram, printable, shortened, side_by_side
from training.utils.base.console import counted
from training.utils.contracts.rows import MEDIA_COLUMN
from training.utils.data.files.columns import column_names

NOT_READ = "not read"


def as_json(account: Account) -> dict[str, Any]:
    """The account as JSON values, by the names of its records."""
    values = asdict(account)
    for phase in values["phases"]:
        if phase["lengths"] is not None:
            phase["lengths"].pop("rows")
        for row in phase["rows"]:
            row[MEDIA_COLUMN] = [words for _, words, _ in row.pop("media")]
    return {**values, "refused": account.refused}


def as_lines(account: Account, style: Style) -> Iterator[str]:
    """The rows first, then their figures: a terminal shows the end of a long text."""
    for phase in account.phases:
        for row in phase.rows:
            yield f"== {row_title(phase, row, account.unit)}"
            yield from _row(row, style)
            yield ""
    for source in account.sources:
        yield from _source(source, style.width)
    yield from textwrap.wrap(account.style, max(style.width, 40), subsequent_indent="    ", break_on_hyphens=False)
    for phase in account.phases:
        yield from _phase(phase, account)


def row_title(phase: PhaseAccount, row: ShownRow, unit: str) -> str:
    """Phase, place and length of a row."""
    cut = f", cut from {row.whole_tokens:,}" if row.tokens < row.whole_tokens else ""
    return f"step {phase.phase}, {row.where}: {row.tokens:,} {unit}{cut}"


def _row(row: ShownRow, style: Style) -> Iterator[str]:
    yield from _parts(row, style)
    for number, (kind, words, _) in enumerate(row.media, start=1):
        yield f"{kind} {number}: {words}"


def _parts(row: ShownRow, style: Style) -> Iterator[str]:
    if len(row.texts) > 1:
        parts = [(name, printable(text), loss) for name, runs in row.texts for text, loss in runs]
        names, texts, losses = zip(*parts, strict=True)
        yield from side_by_side(names, texts, losses, style)
        return
    ((_, runs),) = row.texts
    yield "".join(style.mark(printable(text)) if loss else printable(text) for text, loss in runs)
    for name, value in row.others.items():
        if value is not None:
            yield f"{name}: {printable(shortened(str(value)))}"


def _source(source: SourceAccount, width: int) -> Iterator[str]:
    held_out = f", and {source.own_evaluation_rows:,} for evaluation" if source.own_evaluation_rows else ""
    yield f"{source.name}: {counted(source.rows, 'training row')}{held_out}"
    yield from _wrapped(reading(source), width)
    if source.columns:
        yield from _table(column_table(source), width)


def reading(source: SourceAccount) -> str:
    """A sentence on how a source is read, or why it is not."""
    if source.refused is not None:
        return f"refused: {source.refused}"
    if source.recognised is None:
        return f"read by {source.kind}"
    unread = [*source.recognised.texts_not_read, *source.recognised.others_not_read]
    along = f"; not read: {column_names(unread)} (step 3 passes them to the rewards with the prompt)" if unread else ""
    notes = "".join(f"; {note}" for note in source.recognised.notes)
    return f"read as {source.recognised.format} because of {source.recognised.why}{along}{notes}"


def column_table(source: SourceAccount) -> list[tuple[str, str, str, str]]:
    """Its columns, below a line of titles."""
    decided = source.recognised is not None
    rows = [
        (each.name, " or ".join(each.kinds) or "null", each.read_as or (NOT_READ if decided else ""), each.example)
        for each in source.columns
    ]
    return [("column", "holds", "read as", "first value"), *rows]


def _phase(phase: PhaseAccount, account: Account) -> Iterator[str]:
    yield f"step {phase.phase} ({phase.name}): {share_sentence(phase)}"
    for sentence in findings(phase, account.unit):
        yield f"  {sentence}"
    if phase.lengths is not None and phase.share_rows:
        yield from histogram(phase.lengths.rows, unit=account.unit)


def share_sentence(phase: PhaseAccount) -> str:
    """A sentence on how many rows the phase gets, and how it would get all."""
    share = f"{phase.share_rows:,} of {phase.all_rows:,} training rows ({phase.share_flags})"
    if phase.share_rows < phase.all_rows and "--max_train_rows" not in phase.share_flags:
        everything = ",".join("1" if number == phase.phase else "0" for number in (1, 2, 3))
        share += f"; --data_split {everything} uses all"
    return f"{share}; {phase.eval_rows:,} held out"


def findings(phase: PhaseAccount, unit: str) -> list[str]:
    """Lines on the rows: kept, cut, dropped and why, their lengths, and where the loss falls."""
    lines = [] if phase.refused is None else [f"refused: {phase.refused}"]
    if phase.stopping:
        lines.append(f"{phase.stopping:,} of these rows would stop training; the figures exclude them")
        lines += [f"  {row.where}: {row.reason}" for row in phase.stopping_rows]
    if not phase.looked_at:
        return lines
    sample = "" if phase.looked_at == phase.share_rows else f" {phase.looked_at:,} checked:"
    limit = ""
    if phase.kept and phase.limit_tokens is not None:
        limit = f", {phase.cut:,} of them cut at {phase.limit_flag} {phase.limit_tokens:,}"
    lines.append(f"{sample} {phase.kept:,} kept{limit}, {sum(phase.dropped.values()):,} dropped".strip())
    lines += [f"dropped {count:,} ({reason}): {in_words(reason)}" for reason, count in sorted(phase.dropped.items())]
    lines += [f"  {row.where}: {row.reason}" for row in phase.dropped_rows]
    lines += [f"{count:,} {what}" for what, count in sorted(phase.counted.items())]
    if phase.lengths is not None:
        lengths = phase.lengths
        lines.append(
            f"lengths in {unit}, before any cut: least {lengths.least:,}, median {lengths.median:,}, 95th percentile "
            f"{lengths.p95:,}, longest {lengths.most:,}"
        )
    share = f"{phase.targets:,} of {phase.tokens:,} {unit} ({phase.targets / max(phase.tokens, 1):.0%}): "
    lines.append(f"loss: {share if phase.targets else ''}{phase.loss}")
    return lines


def _wrapped(sentence: str, width: int) -> list[str]:
    return textwrap.wrap(
        sentence, max(width, 40), initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )


def _table(rows: Sequence[tuple[str, ...]], width: int) -> Iterator[str]:
    """Rows with aligned columns; the last is cut at the terminal's edge."""
    rows = [tuple(printable(cell).replace("\n", " ") for cell in row) for row in rows]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(room) for cell, room in zip(row, [*widths, 0], strict=True)]
        yield "  " + "  ".join(cells).rstrip()[: max(width, 40) - 2]
