"""Findings in words: lines for a terminal, and JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from threestep.plugins.audit.judge import AGREES, DIFFERS, NOT_JUDGED, Difference, Finding, first_wrong

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threestep.plugins.audit.recording.files import RecordHead


def as_lines(head: RecordHead, findings: Sequence[Finding]) -> list[str]:
    """A line for each quantity, and the verdict last. The method stands first where the settings name it."""
    trainer = " ".join(head.trainer.get(part, "") for part in ("name", "version")).strip() or "unnamed trainer"
    ranks = "1 rank" if head.ranks == 1 else f"{head.ranks} ranks"
    method = head.settings.get("advantage") or head.objective
    width = max(len(finding.name) for finding in findings)
    lines = [f"{method}, step {head.step:,}, {ranks}, {trainer}"]
    lines += [f"  {finding.name:<{width}}  {finding.state:<10}  {detail(finding)}".rstrip() for finding in findings]
    return [*lines, verdict(findings)]


def verdict(findings: Sequence[Finding]) -> str:
    """One sentence: the first quantity that is wrong, and why; or that none is."""
    wrong = first_wrong(findings)
    if wrong is None or wrong.difference is None:
        judged = sum(finding.state == AGREES for finding in findings)
        if not judged:
            return "nothing is judged: the record lacks what every quantity is computed from"
        return f"no difference: {judged} of {len(findings)} quantities are judged, and all agree with their references"
    difference = wrong.difference
    words = f"the first wrong quantity is {wrong.name}: {_numbers(wrong.name, difference)}; {_cause(difference)}"
    return words if difference.causes else words + _of_another(findings)


def _of_another(findings: Sequence[Finding]) -> str:
    """The cause of the first quantity that has one, where the first wrong one has none."""
    for finding in findings:
        if finding.difference is not None and finding.difference.causes:
            return f"; {finding.name} differs too, {_cause(finding.difference)}"
    return ""


def _cause(difference: Difference) -> str:
    if not difference.causes:
        return "no known cause gives the recorded numbers"
    first, *others = difference.causes
    also = "".join(f"; or, with the same numbers here: {other}" for other in others)
    return f"cause: {first}{also}"


# Quantities whose numbers are marks of sequences, and say nothing to a reader.
_MARKS = ("token_ids", "data_mask")


def _numbers(name: str, difference: Difference) -> str:
    if name in _MARKS:
        return f"wrong in {difference.entries:,} of {difference.of:,} sequences, first {difference.first}"
    is_known = not math.isnan(difference.right) and difference.right != difference.recorded
    right = f"{difference.right:.6g}" if is_known else "another number"
    most = f"recorded {difference.recorded:.6g}, expected {right}"
    if not difference.where:
        if difference.of > 1:
            return f"{difference.entries:,} of {difference.of:,} numbers differ; the largest difference: {most}"
        ratio = f", {difference.recorded / difference.right:.6g} times" if abs(difference.right) > 0 else ""
        return f"{most}{ratio}"
    return (
        f"{difference.entries:,} of {difference.of:,} differ, first at {difference.first}; the largest difference is "
        f"at {difference.where}: {most}"
    )


def detail(finding: Finding) -> str:
    """The numbers of a finding, or what the record lacks."""
    if finding.state == NOT_JUDGED:
        return f"lacks {finding.lacks}"
    if finding.difference is not None:
        return _numbers(finding.name, finding.difference)
    return f"{finding.of:,} numbers" if finding.of > 1 else ""


def as_json(head: RecordHead, findings: Sequence[Finding]) -> dict[str, Any]:
    """The same as one object."""
    return {
        "objective": head.objective,
        "step": head.step,
        "verdict": verdict(findings),
        "findings": [
            {
                "name": finding.name,
                "state": finding.state,
                "of": finding.of,
                **({"lacks": finding.lacks} if finding.lacks else {}),
                **({"difference": _plain(vars(finding.difference))} if finding.state == DIFFERS else {}),
            }
            for finding in findings
        ],
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The same with None for numbers that JSON does not have."""
    return {
        name: None if isinstance(each, float) and not math.isfinite(each) else each for name, each in values.items()
    }
