"""A page as one HTML file: style and scripts inside, nothing from a network. The pages of threestep.plugins.inspect,
threestep.plugins.inspect.preview and threestep.plugins.evaluation.evaluate have this form too.

What a model or a dataset wrote is untrusted: whoever makes a body escapes every text, and the page's policy runs no
script but those whose digests it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from threestep.plugins.report.pages.style import STYLE

_FLAG = re.compile(r"--\w+( \d+)?")


def document(
    title: str,
    body: str,
    style: str = "",
    scripts: Sequence[str] = (),
    *,
    data: Mapping[str, Any] | None = None,
    late: Mapping[str, Any] | None = None,
) -> str:
    """A whole page.

    style: rules of this page, after the sheet that all share
    scripts: sources, which run after `body` is there
    data: JSON values for the scripts, by the id of the element that holds each
    late: more of them, which stand after the scripts: a script that is run has them once the page is read
    """
    sources = "".join(f"<script>{source}</script>" for source in scripts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts, follows="live" in (data or {}))}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Threestep</title><style>{STYLE}{style}</style></head>"
        f"<body>{body}{_values(data)}{sources}{_values(late)}</body></html>\n"
    )


def _values(data: Mapping[str, Any] | None) -> str:
    return "".join(
        f'<script type="application/json" id="{name}">{_json(it)}</script>' for name, it in (data or {}).items()
    )


def policy(scripts: Sequence[str], follows: bool = False) -> str:
    """The page's content security policy. follows: it may send requests to its server."""
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", "base-uri 'none'", "form-action 'none'"]
    rules += ["img-src data:"]  # small copies of a row's media, which the page holds
    digests = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in scripts]
    rules += [" ".join(["script-src", *(f"'sha256-{digest}'" for digest in digests)])] if scripts else []
    rules += ["connect-src 'self'"] if follows else []
    return "; ".join(rules)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] | range | None = None) -> str:
    """An HTML table of plain texts. numbers: the columns of numbers; None: the columns after the first hold values as a
    file has them."""

    def classes(column: int) -> str:
        if column and numbers is None:
            return ' class="value"'
        return ' class="number"' if numbers and column in numbers else ""

    tags = ["th" if word else "td" for word in head]  # a heading without a word is none
    top = "".join(
        f"<{tag}{classes(n)}>{escape(word)}</{tag}>" for n, (tag, word) in enumerate(zip(tags, head, strict=True))
    )
    body = "".join(
        f"<tr>{''.join(f'<td{classes(column)}>{escape(cell)}</td>' for column, cell in enumerate(row))}</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>"


def scrolled(content: str, name: str) -> str:
    """A wide table in a card that scrolls sideways by itself, also by the keyboard."""
    return f'<div class="card scroll" tabindex="0" role="region" aria-label="{escape(name)}">{content}</div>'


def direction(text: str) -> str:
    """The direction of a text, HTML or plain, by most of its letters: dir="auto" takes the first one's, and what a
    model with random weights writes has letters of all kinds."""
    kinds = Counter(map(unicodedata.bidirectional, re.sub("<[^>]*>", "", text)))
    return "rtl" if kinds["R"] + kinds["AL"] > kinds["L"] else "ltr"


def with_flags(sentence: str) -> str:
    """A plain text as HTML in which no line breaks a flag."""
    return _FLAG.sub(r"<code>\g<0></code>", escape(sentence))


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Figures in boxes: (name, value); what a value has in parentheses stands smaller below it."""

    def box(name: str, value: str) -> str:
        figure, _, note = value.partition(" (")
        below = f'<span class="soft">{escape(note.removesuffix(")"))}</span>' if note else ""
        return f'<div class="tile"><span class="soft">{escape(name)}</span><b>{escape(figure)}</b>{below}</div>'

    return tile_grid([box(name, value) for name, value in figures])


def tile_grid(boxes: Sequence[str]) -> str:
    """Boxes in rows of at most five, of equal length as far as possible: none stands alone in the last one."""
    if not boxes:
        return ""
    rows = -(-len(boxes) // 5)
    return f'<div class="tiles" style="--columns: {-(-len(boxes) // rows)}">{"".join(boxes)}</div>'


def _json(value: Any) -> str:
    """JSON that no text in it can end: every < as its escape."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
