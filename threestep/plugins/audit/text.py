"""Findings in words: lines for a terminal, and JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from threestep.plugins.audit.judge import AGREES, DIFFERS, NOT_JUDGED, Difference, Finding, first_wrong
from threestep.plugins.audit.recording.schema import FIGURES, STATES, TENSORS
from training.utils.base.console import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threestep.plugins.audit.recording.files import RecordHead


def as_lines(head: RecordHead, findings: Sequence[Finding]) -> list[str]:
    """A line for each quantity that is judged, one for each reason why others are not, and the verdict last."""
    judged = [finding for finding in findings if finding.state != NOT_JUDGED]
    width = max((len(finding.name) for finding in judged), default=0)
    lines = [f"  {finding.name:<{width}}  {finding.state:<7}  {detail(finding)}" for finding in judged]
    unjudged = [f"  not judged: {', '.join(names)}: {why}" for why, names in not_judged(head, findings).items()]
    return [title(head), *lines, *unjudged, verdict(findings)]


def title(head: RecordHead) -> str:
    """The method, where the settings name it, the step and who took it."""
    trainer = " ".join(head.trainer.get(part, "") for part in ("name", "version")).strip() or "unnamed trainer"
    method = head.settings.get("advantage") or head.objective
    return f"{method}, step {head.step:,}, {counted(head.ranks, 'rank')}, {trainer}"


def not_judged(head: RecordHead, findings: Sequence[Finding]) -> dict[str, list[str]]:
    """The names of the quantities that are not judged, by what is missing and how to have it."""
    found: dict[str, list[str]] = {}
    for finding in findings:
        if finding.state == NOT_JUDGED:
            found.setdefault(_reason(head, finding.lacks), []).append(finding.name)
    return found


_OF_VALUES = ("the state ", "the weights", "the tensor logits, or", "the critic's model", "log-probabilities")

_OF_LOSS = ("policy_loss", "clip_low", "clip_high", "dual_clip")
_OF_REFERENCE = ("rollout_ref_logprobs", "ref_logprobs", "kl_loss")


def _reason(head: RecordHead, lacks: str) -> str:
    is_own, (kind, _, name) = head.trainer.get("name") == "threestep", lacks.removeprefix("the ").partition(" ")
    if is_own and lacks.startswith(_OF_VALUES):
        return (
            "the record has no weights and gradients; to judge these, record the step with --record_steps "
            f"{head.step} --record_values (models of up to 20 million weights)"
        )
    if kind == "setting" and name in _OF_LOSS and is_own and "policy_loss" not in head.settings:
        return "the policy loss is a function of your own, which has no reference"
    if name in _OF_REFERENCE and is_own and head.settings.get("kl_in") == "none":
        return "the run has no reference model (--kl_coef 0)"
    if kind == "setting":
        why = " (a function of your own has no reference)" if is_own else ""
        return f"the record has no setting '{name}'{why}; to judge by one of the format, add --as {name}=VALUE"
    if is_own and kind in ("tensor", "figure"):
        return "Threestep does not record these numbers; what follows from them is judged"
    return f"the record lacks {lacks}"


def meaning(name: str) -> str:
    """A quantity in words."""
    field = TENSORS.get(name)
    return (field.meaning if field else FIGURES.get(name) or STATES.get(f"{name}.", "")).replace("`", "")


def verdict(findings: Sequence[Finding]) -> str:
    """One sentence: the first quantity that is wrong, and why; or that none is."""
    wrong = first_wrong(findings)
    if wrong is None or wrong.difference is None:
        judged = sum(finding.state == AGREES for finding in findings)
        if not judged:
            return "nothing is judged: the record lacks what every quantity is computed from"
        counts = f"{judged} of {len(findings)} quantities are judged"
        return f"no difference: {counts}, and all agree with their references{_apart(findings)}"
    difference = wrong.difference
    words = f"the first wrong quantity is {wrong.name}: {_numbers(wrong.name, difference)}; {_cause(difference)}"
    return words if difference.causes else words + _of_another(findings)


def _apart(findings: Sequence[Finding]) -> str:
    """The quantity that is farthest from its reference, by a difference that is seen: rounding in its dtype allows
    it."""
    known = [(finding, *finding.farthest) for finding in findings if finding.farthest and finding.name not in MARKS]
    seen = [(abs(recorded - right), finding, may) for finding, recorded, right, may in known if math.isfinite(may)]
    distance, finding, may = max(seen, key=lambda each: each[0], default=(0.0, None, 0.0))
    if finding is None or distance < _SEEN:
        return ""
    return f"; rounding allows the largest difference, {distance:.2g} of {finding.name} (allowed: {may:.2g})"


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


_SEEN = 1e-3  # a difference that the first sentence speaks of
_FARTHEST = ("recorded", "right", "allowed")


def allowed(difference: float) -> str:
    """The distance that a number may have from its reference; two policies may be any distance apart."""
    return f"{difference:.2g}" if math.isfinite(difference) else "any"


# Quantities whose numbers are marks of sequences, and say nothing to a reader.
MARKS = ("token_ids", "data_mask")


def _numbers(name: str, difference: Difference) -> str:
    if name in MARKS:
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
    """The numbers of a finding that is judged."""
    if finding.difference is not None:
        return _numbers(finding.name, finding.difference)
    if finding.name in MARKS:
        return f"right in {finding.of:,} sequences"
    if finding.farthest is None:
        return "no number counts"
    recorded, right, may = finding.farthest
    if recorded == right:
        return f"{finding.of:,} numbers, all equal" if finding.of > 1 else f"recorded and expected {right:.6g}"
    apart = f"difference {abs(recorded - right):.2g} (allowed: {allowed(may)})"
    pair = f"recorded {recorded:.6g}, expected {right:.6g}, {apart}"
    return f"{finding.of:,} numbers; largest difference: {pair}" if finding.of > 1 else pair


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
                **(_plain(dict(zip(_FARTHEST, finding.farthest, strict=True))) if finding.farthest else {}),
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
