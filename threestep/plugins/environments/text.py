"""The check of an environment as lines for a terminal, as JSON, and as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from threestep.plugins.environments.findings import WRONG, Checked, ScriptFigures, in_seconds
from threestep.plugins.environments.playing import line_of, signature_of
from threestep.plugins.report.pages.document import document, scrolled, table

_STYLE = """
.wrong { border-left: 4px solid var(--bad); }
td.wrong { color: var(--bad); border-left: 0; }
.talk { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30em; overflow: auto; }
"""
_MOST_CHARACTERS = 2000  # of a message on the page


def as_lines(name: str, checked: Checked) -> Iterator[str]:
    """Yield a line for each finding, the verdict first."""
    yield verdict(name, checked)
    width = max(len(finding.name) for finding in checked.findings)
    for finding in checked.findings:
        yield f"  {finding.name:<{width}}  {finding.state:<9}  {finding.sentence}"


def verdict(name: str, checked: Checked) -> str:
    """The check in a sentence."""
    wrong = [finding.name for finding in checked.findings if finding.state == WRONG]
    return f"{name}: {'wrong: ' + ', '.join(wrong) if wrong else 'nothing wrong was found'}"


def as_json(name: str, checked: Checked) -> dict[str, Any]:
    """All but the example as JSON values."""
    scripts = [each._asdict() for each in checked.scripts]
    for each in scripts:
        each["rewards"] = [None if math.isnan(value) else value for value in each["rewards"]]
    findings = [finding._asdict() for finding in checked.findings]
    return {"environment": name, "is_good": checked.is_good, "findings": findings, "scripts": scripts}


def page(name: str, checked: Checked) -> str:
    """Return the whole page."""
    rows = "".join(
        f'<tr><td class="value metric">{escape(finding.name)}</td>'
        f'<td class="{"wrong" if finding.state == WRONG else "soft"}">{escape(finding.state)}</td>'
        f'<td class="value">{escape(finding.sentence)}</td></tr>'
        for finding in checked.findings
    )
    head = ["turn", "conversations", "turns", "over", "reward", "slowest step", "first failure"]
    scripts = table(head, [_script_row(each) for each in checked.scripts], numbers=range(1, 6))
    kind = "warning" if checked.is_good else "warning wrong"
    return document(
        f"Environment {name}",
        f'<header><h1>Environment</h1><p class="soft paths">{escape(name)}</p>'
        f'<p class="{kind}">{escape(verdict(name, checked))}</p></header><main><h2>Findings</h2>'
        + scrolled(f"<table><tr><th>question</th><th>state</th><th></th></tr>{rows}</table>", "findings")
        + "<h2>The same message as every turn</h2>"
        + scrolled(scripts, "scripts")
        + f"<h2>A conversation</h2>{_example(checked)}</main><footer>Written by threestep inspect env check.</footer>",
        _STYLE,
    )


def _script_row(each: ScriptFigures) -> list[str]:
    rewards = [f"{value:g}" for value in dict.fromkeys(each.rewards) if not math.isnan(value)]
    turns = [str(value) for value in dict.fromkeys(each.turns)]
    return [
        each.script,
        f"{each.conversations:,}",
        " – ".join(turns),
        f"{each.done:,}",
        " – ".join(rewards) or "–",
        in_seconds(each.slowest),
        each.problem,
    ]


def _example(checked: Checked) -> str:
    row, conversation = checked.example
    opening = conversation.opening
    if opening is None:
        return f'<div class="card talk">{escape(conversation.problems[0])}</div>'
    lines = [line_of(message)[:_MOST_CHARACTERS] for message in opening.messages]
    lines += [f"tools: {', '.join(map(signature_of, opening.tools))}"] if opening.tools else []
    for reply in conversation.replies:
        lines.append(f"model> ({conversation.script})")
        lines += [line_of(message)[:_MOST_CHARACTERS] for message in reply.messages]
        lines.append(f"  reward {reply.reward:g}{', done' if reply.done else ''}")
    return f'<div class="card talk">{escape(chr(10).join(lines))}</div>'
