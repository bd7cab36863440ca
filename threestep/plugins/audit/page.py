"""Findings as one HTML page: the verdict first, then every judged quantity, then what the record lacks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from threestep.plugins.audit.judge import DIFFERS, NOT_JUDGED, Finding, first_wrong
from threestep.plugins.audit.text import as_lines, detail, verdict
from threestep.plugins.report.pages.document import document, scrolled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threestep.plugins.audit.recording.files import RecordHead

_OWN_STYLE = """
.verdict { overflow-wrap: anywhere; }
.wrong { border-left: 4px solid var(--bad); }
.right { border-left: 4px solid var(--good); color: var(--good); background: none; }
td.differs { color: var(--bad); }
"""


def page(name: str, head: RecordHead, findings: Sequence[Finding], notes: Sequence[str] = ()) -> str:
    """Return the whole page. name: of the record"""
    title = f"{name}: {as_lines(head, findings)[0]}"
    kind = "warning verdict wrong" if first_wrong(findings) is not None else "warning verdict right"
    judged = [finding for finding in findings if finding.state != NOT_JUDGED]
    others = [finding for finding in findings if finding.state == NOT_JUDGED]
    summary = f"<summary>{len(others)} not judged: the record lacks what they need</summary>"
    lacking = f"<details>{summary}{_table(others)}</details>" if others else ""
    causes = "".join(f"<li>{escape(cause)}</li>" for finding in findings for cause in _causes(finding))
    listed = f"<h2>Causes that give the recorded numbers</h2><ul>{causes}</ul>" if causes else ""
    said = "".join(f'<p class="warning">{escape(note)}</p>' for note in notes)
    return document(
        f"Audit: {title}",
        f'<header><h1>Audit</h1><p class="soft paths">{escape(title)}</p><p '
        f'class="{kind}">{_first_cause(findings)}{escape(verdict(findings))}</p>{said}</header><main>{listed}'
        f"<h2>Quantities</h2>{_table(judged)}{lacking}</main><footer>Written by threestep audit. "
        "Each quantity is recomputed from those before it.</footer>",
        _OWN_STYLE,
    )


def _table(findings: Sequence[Finding]) -> str:
    rows = "".join(map(_row, findings))
    return scrolled(f"<table><tr><th>quantity</th><th>state</th><th></th></tr>{rows}</table>", "quantities")


def _first_cause(findings: Sequence[Finding]) -> str:
    """The cause of the first wrong quantity, before its numbers."""
    wrong = first_wrong(findings)
    first = () if wrong is None or wrong.difference is None else wrong.difference.causes[:1]
    return "".join(f"<strong>{escape(cause[0].upper() + cause[1:])}.</strong><br>" for cause in first)


def _row(finding: Finding) -> str:
    kind = "differs" if finding.state == DIFFERS else "soft" if finding.state == NOT_JUDGED else "value"
    return (
        f'<tr><td class="value metric">{escape(finding.name)}</td><td class="{kind}">{escape(finding.state)}</td>'
        f'<td class="value">{escape(detail(finding))}</td></tr>'
    )


def _causes(finding: Finding) -> list[str]:
    return [] if finding.difference is None else [f"{finding.name}: {cause}" for cause in finding.difference.causes]
