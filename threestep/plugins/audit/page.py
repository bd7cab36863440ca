"""Findings as one HTML page: the verdict first, then every judged quantity, then what the record lacks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from threestep.plugins.audit.judge import NOT_JUDGED, Finding, first_wrong
from threestep.plugins.audit.text import MARKS, allowed, detail, meaning, not_judged, verdict
from threestep.plugins.audit.text import title as title_of
from threestep.plugins.report.pages.document import document, scrolled, with_flags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threestep.plugins.audit.recording.files import RecordHead

_OWN_STYLE = """
.verdict { overflow-wrap: anywhere; }
.wrong { border-left: 4px solid var(--bad); }
.right { border-left: 4px solid var(--good); color: var(--good); background: none; }
td.differs { color: var(--bad); } td.agrees { color: var(--good); }
td small { display: block; color: var(--soft); font-size: 13px; min-width: 130px; }
@media (max-width: 600px) { .scroll tbody { display: block; }
  .scroll tr { display: grid; grid-template-columns: repeat(3, 1fr); border-bottom: 1px solid var(--grid); }
  .scroll td, .scroll th { border: 0; } .scroll tr > :first-child { grid-column: 1 / -1; } }
"""


def page(name: str, head: RecordHead, findings: Sequence[Finding], notes: Sequence[str] = ()) -> str:
    """Return the whole page. name: of the record"""
    title = f"{name}: {title_of(head)}"
    kind = "warning verdict wrong" if first_wrong(findings) is not None else "warning verdict right"
    judged = [finding for finding in findings if finding.state != NOT_JUDGED]
    reasons = "".join(
        f'<p class="paths"><b>{escape(", ".join(names))}</b>: {with_flags(why)}.</p>'
        for why, names in not_judged(head, findings).items()
    )
    lacking = f'<h2>Not judged</h2><div class="card sentences">{reasons}</div>' if reasons else ""
    causes = "".join(f"<li>{escape(cause)}</li>" for finding in findings for cause in _causes(finding))
    listed = f"<h2>Causes that give the recorded numbers</h2><ul>{causes}</ul>" if causes else ""
    said = "".join(f'<p class="warning">{escape(note)}</p>' for note in notes)
    return document(
        f"Audit: {title}",
        f'<header><h1>Audit</h1><p class="soft paths">{escape(title)}</p><p '
        f'class="{kind}">{_first_cause(findings)}{escape(verdict(findings))}</p>{said}</header><main>{listed}'
        f"<h2>Quantities</h2>{_table(judged)}{lacking}</main><footer>Written by threestep audit. "
        "Each quantity is recomputed in float64 from those before it: recorded is what the run had, expected what the "
        "reference gives; of several numbers, the two that are farthest apart.</footer>",
        _OWN_STYLE,
    )


def _table(findings: Sequence[Finding]) -> str:
    rows = "".join(map(_row, findings))
    names = ("numbers", "recorded", "expected", "difference", "allowed")
    heads = "".join(f'<th class="number">{word}</th>' for word in names)
    return scrolled(f"<table><tr><th>quantity</th><th>state</th>{heads}</tr>{rows}</table>", "quantities")


def _first_cause(findings: Sequence[Finding]) -> str:
    """The cause of the first wrong quantity, before its numbers."""
    wrong = first_wrong(findings)
    first = () if wrong is None or wrong.difference is None else wrong.difference.causes[:1]
    return "".join(f"<strong>{escape(cause[0].upper() + cause[1:])}.</strong><br>" for cause in first)


def _row(finding: Finding) -> str:
    found = finding.difference
    cells = [f"{finding.of:,}"]
    if finding.name not in MARKS and (found or finding.farthest):
        recorded, right, *may = finding.farthest or (found.recorded, found.right)  # type: ignore[union-attr]
        cells += [f"{recorded:.6g}", f"{right:.6g}", f"{abs(recorded - right):.2g}", *map(allowed, may)]
    numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in (*cells, *[""] * 5)[:5])
    said = meaning(finding.name) if found is None else detail(finding)
    return (
        f'<tr><td><span class="value">{escape(finding.name)}</span><small>{escape(said)}</small></td>'
        f'<td class="{finding.state}">{escape(finding.state)}</td>{numbers}</tr>'
    )


def _causes(finding: Finding) -> list[str]:
    return [] if finding.difference is None else [f"{finding.name}: {cause}" for cause in finding.difference.causes]
