"""The page of threestep.plugins.inspect.preview: rows as the model is fed them, with what carries loss marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from threestep.plugins.report.pages.document import document
from threestep.plugins.report.pages.marked import MARKED_STYLE, Run, length_chart, marked_texts, shown_media


@dataclass(frozen=True)
class PageRow:
    """texts: its parts by name, each in runs; beside: what else it carries, (name, value); media: see `shown_media`."""

    title: str
    texts: Sequence[tuple[str, Sequence[Run]]]
    beside: Sequence[tuple[str, str]] = ()
    media: Sequence[tuple[str, str, str]] = ()


def rows_page(
    title: str, sentences: Sequence[str], rows: Sequence[PageRow], lengths: Sequence[tuple[int, int, int]]
) -> str:
    """Return the whole page. lengths: (from, to, rows), a bar each."""
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    cards = "".join(
        f'<div class="card sample"><p class="soft paths">{escape(row.title)}</p>{marked_texts(row.texts)}'
        + "".join(f'<p class="soft paths lines">{escape(name)}: {escape(value)}</p>' for name, value in row.beside)
        + shown_media(row.media)
        + "</div>"
        for row in rows
    )
    bars = f'<div class="card"><h2 class="small">Tokens of a row</h2>{length_chart(lengths)}</div>' if lengths else ""
    return document(
        f"preview of {title}",
        f'<header><h1>Rows of {escape(title)}</h1>{paragraphs}<p class="soft"><mark>Marked text</mark> carries '
        f"loss; the rest is only read.</p></header><main>{cards}{bars}</main><footer>Written by threestep inspect "
        "preview.</footer>",
        MARKED_STYLE,
    )
