"""A bisection as one HTML page: the verdict first, then what differs, the drift, and the flags."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from threestep.plugins.audit.bisect.text import advice, counts, headline, notes, verdict
from threestep.plugins.report.pages.document import document, scrolled, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threestep.plugins.audit.bisect.bisect import Bisection
    from threestep.plugins.audit.bisect.digest_files import RunDigests

_OWN_STYLE = """
.verdict { overflow-wrap: anywhere; }
.wrong { border-left: 4px solid var(--bad); margin-bottom: 1rem; }
code { overflow-wrap: anywhere; }
"""


def page(a: RunDigests, b: RunDigests, found: Bisection) -> str:
    """Return the whole page."""
    title = headline(a, b, found)
    kind = "warning verdict wrong" if found.comparison.first is not None else "warning verdict"
    parts = [_located(found), _drift(found), _flags(found), _notes(notes(a, b, found))]
    return document(
        f"Audit: {title}",
        f'<header><h1>Audit of two runs</h1><p class="soft paths">{escape(title)}</p><p '
        f'class="{kind}">{escape(verdict(found))}</p>{_next(found)}</header><main>{"".join(parts)}</main><footer>'
        "Written by threestep audit. Quantities are listed in the order of the data flow.</footer>",
        _OWN_STYLE,
    )


def _next(found: Bisection) -> str:
    listed = "".join(f"<li>{_with_code(each)}</li>" for each in advice(found))
    return f"<p>What to do next:</p><ul>{listed}</ul>" if listed else ""


def _with_code(sentence: str) -> str:
    """HTML of a sentence with commands between backticks."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(sentence))


def _located(found: Bisection) -> str:
    if not found.located:
        return ""
    rows = [[each.part, each.name, each.where, each.a, each.b, counts(each)] for each in found.located]
    head = ["part", "quantity", "first at", "A", "B", "differ"]
    return f"<h2>What differs in this step</h2>{scrolled(table(head, rows), 'quantities')}"


def _drift(found: Bisection) -> str:
    rows = [
        [f"{step:,}" + (f", update {update}" if update else ""), f"{own:.2e}"]
        for (step, update), own in found.comparison.drift.items()
        if step
    ]
    if not found.comparison.of_rounding or not rows:
        return ""
    why = escape("; ".join(found.comparison.of_rounding))
    return f"<h2>Drift</h2><p>Rounding may differ: {why}.</p>" + scrolled(
        table(["step", "largest difference so far"], rows[-50:]), "drift"
    )


def _flags(found: Bisection) -> str:
    if not found.settings:
        return ""
    rows = [[f"--{name}", str(a), str(b)] for name, (a, b) in found.settings.items()]
    return f"<h2>Flags that differ</h2>{scrolled(table(['flag', 'A', 'B'], rows), 'flags')}"


def _notes(notes: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h2>Notes</h2><ul>{listed}</ul>" if listed else ""
