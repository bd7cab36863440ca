"""An account as one HTML page: style inside, no script, nothing from a network; tokens that carry loss are marked.

Data are untrusted: every text passes through `escape`, and the page's policy forbids scripts and requests.
"""

from __future__ import annotations

from html import escape

from threestep.plugins.inspect.account import Account, PhaseAccount, ShownRow, SourceAccount, in_words
from threestep.plugins.inspect.text import NOT_READ, column_table, reading, row_title, share_sentence
from threestep.plugins.inspect.views import length_bars, shortened
from threestep.plugins.report.pages.document import document, scrolled, tiles
from threestep.plugins.report.pages.marked import MARKED_STYLE, length_chart, marked_texts, shown_media
from training.utils.base.console import counted

_OWN_STYLE = """
.scroll td.first { min-width: 240px; }
.reasons { margin: 8px 0 0; padding-left: 18px; font-size: 14px; }
.reasons li { overflow-wrap: anywhere; }
.refused { border-left: 4px solid var(--bad); overflow-wrap: anywhere; }
td.unread { color: var(--bad); }
#sources .card + .card { margin-top: 12px; }
h3 { overflow-wrap: anywhere; }
"""


def page(account: Account) -> str:
    """Return the whole page."""
    anchors = [("sources", "Data"), *((f"phase{each.phase}", f"Step {each.phase}") for each in account.phases)]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in anchors)
    names = ", ".join(source.name for source in account.sources)
    refused = "" if account.refused is None else f'<p class="warning refused">{escape(account.refused)}</p>'
    sources = "".join(map(_source, account.sources))
    phases = "".join(_phase(phase, account) for phase in account.phases)
    return document(
        f"{names}: what will be trained",
        f'<header><h1>What will be trained</h1><p class="soft paths">{escape(names)}</p><nav>{links}</nav>{refused}'
        f'<p class="warning">{escape(account.style)}</p></header>'
        f'<main><section id="sources"><h2>Data</h2>{sources}</section>{phases}</main>'
        "<footer>Written by threestep inspect. Marked text carries loss; the rest is read only.</footer>",
        MARKED_STYLE + _OWN_STYLE,
    )


def _source(source: SourceAccount) -> str:
    held_out = f", and {source.own_evaluation_rows:,} for evaluation" if source.own_evaluation_rows else ""
    head = f"<h3>{escape(source.name)}</h3><p>{counted(source.rows, 'training row')}{held_out}</p>"
    kind = ' class="warning refused"' if source.refused is not None else ""
    head += f"<p{kind}>{escape(reading(source))}</p>"
    titles, *columns = column_table(source)
    if not columns:
        return f'<div class="card">{head}</div>'
    body = "".join(
        f'<tr><td class="value metric">{escape(name)}</td><td>{escape(holds)}</td>'
        f'<td class="{"unread" if role == NOT_READ else "role"}">{escape(role)}</td>'
        f'<td class="value first">{escape(example)}</td></tr>'
        for name, holds, role, example in columns
    )
    top = "".join(f"<th>{title}</th>" for title in titles)
    columns_of = f"columns of {source.name}"
    return f'<div class="card">{head}</div>' + scrolled(f"<table><tr>{top}</tr>{body}</table>", columns_of)


def _phase(phase: PhaseAccount, account: Account) -> str:
    unit = account.unit
    body = f"<p>{escape(share_sentence(phase))}</p>"
    if phase.refused is not None:
        body += f'<p class="warning refused">{escape(phase.refused)}</p>'
    if phase.looked_at:
        body += tiles(_figures(phase, unit))
        body += f'<p class="soft">Loss: {escape(phase.loss)}.</p>'
        body += f'<div class="blocks">{_lengths(phase, unit)}{_dropped(phase)}</div>'
    if phase.rows:
        body += f"<h3>{counted(len(phase.rows), 'row')} as the model sees them</h3>"
        body += "".join(_row(phase, row, unit) for row in phase.rows)
    return f'<section id="phase{phase.phase}"><h2>Step {phase.phase}: {escape(phase.name)}</h2>{body}</section>'


def _figures(phase: PhaseAccount, unit: str) -> list[tuple[str, str]]:
    sample = "" if phase.looked_at == phase.share_rows else f" of {phase.share_rows:,}"
    figures = [
        ("rows looked at" + sample, f"{phase.looked_at:,}"),
        ("kept", f"{phase.kept:,}"),
        ("dropped", f"{sum(phase.dropped.values()):,}"),
    ]
    if phase.limit_tokens is not None:
        figures.append((f"cut at {phase.limit_flag} {phase.limit_tokens:,}", f"{phase.cut:,}"))
    if phase.targets:
        figures.append((f"of {phase.tokens:,} {unit} carry loss", f"{phase.targets / phase.tokens:.0%}"))
    return figures


def _lengths(phase: PhaseAccount, unit: str) -> str:
    if phase.lengths is None:
        return ""
    lengths = phase.lengths
    return (
        f'<div class="card"><h3>Lengths in {unit}, before any cut</h3><p class="soft">least {lengths.least:,}, median '
        f"{lengths.median:,}, 95th percentile {lengths.p95:,}, longest {lengths.most:,}</p>"
        f"{length_chart(length_bars(lengths.rows), phase.limit_tokens)}</div>"
    )


def _dropped(phase: PhaseAccount) -> str:
    counts = sorted(phase.dropped.items())
    lines = "".join(
        f"<li><b>{count:,}</b> {escape(reason)}: {escape(in_words(reason))}</li>" for reason, count in counts
    )
    lines += "".join(f"<li><b>{count:,}</b> {escape(what)}</li>" for what, count in sorted(phase.counted.items()))
    if phase.stopping:
        why = f"{counted(phase.stopping, 'row')} would stop training"
        rows = "".join(f"<li>{escape(row.where)}: {escape(row.reason)}</li>" for row in phase.stopping_rows)
        return f'<div class="card"><h3>{why}</h3><ul class="reasons">{rows}{lines}</ul></div>'
    if not lines:
        return ""
    rows = "".join(f"<li>{escape(row.where)}: {escape(row.reason)}</li>" for row in phase.dropped_rows)
    some = f'<p class="soft">Among them</p><ul class="reasons">{rows}</ul>' if rows else ""
    title = "Left out, and why" if phase.dropped else "About these rows"
    return f'<div class="card"><h3>{title}</h3><ul class="reasons">{lines}</ul>{some}</div>'


def _row(phase: PhaseAccount, row: ShownRow, unit: str) -> str:
    others = "".join(
        f'<p class="soft paths">{escape(name)}: {escape(shortened(str(value)))}</p>'
        for name, value in row.others.items()
        if value is not None
    )
    title = escape(row_title(phase, row, unit))
    inside = f"{marked_texts(row.texts)}{others}{shown_media(row.media)}"
    return f'<div class="card sample"><p class="soft paths">{title}</p>{inside}</div>'
