"""The judge: every quantity of a record beside its reference, and the causes of those that differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from threestep.plugins.audit.quantities import QUANTITIES, Quantity
from threestep.plugins.audit.quantities.quantity import FLOAT32
from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.audit.recording.schema import FIGURES

if TYPE_CHECKING:
    from collections.abc import Sequence

AGREES, DIFFERS, NOT_JUDGED = "agrees", "differs", "not judged"


@dataclass(frozen=True)
class Difference:
    """entries: that differ, of so many. recorded, right: the numbers where they differ most. where: that entry, and
    the first; "" for a single number. causes: that give the recorded numbers everywhere."""

    entries: int
    of: int
    recorded: float
    right: float
    where: str
    first: str
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """state: one of AGREES, DIFFERS, NOT_JUDGED. of: entries that were compared. lacks: what the record lacks.
    farthest: of one that agrees, recorded and expected where they are farthest apart, and how far they may be."""

    name: str
    state: str
    of: int = 0
    lacks: str = ""
    farthest: tuple[float, float, float] | None = None
    difference: Difference | None = None


def judge(step: AuditedStep, quantities: Sequence[Quantity] = QUANTITIES) -> list[Finding]:
    """Return a finding for each quantity of records of this objective, in the order in which data flow."""
    with np.errstate(all="ignore"):  # a cause that does not apply may divide by 0, and what is recorded be infinite
        return [
            _judged(step, each) for each in quantities if step.head.objective in each.objectives and each.applies(step)
        ]


def first_wrong(findings: Sequence[Finding]) -> Finding | None:
    return next((finding for finding in findings if finding.state == DIFFERS), None)


def _judged(step: AuditedStep, quantity: Quantity) -> Finding:
    try:
        recorded = _recorded(step, quantity)
        right = _floats(quantity.compute(step))
        tolerance = np.broadcast_to(
            _floats(quantity.tolerance(step, right if right.ndim else float(right))), right.shape
        )
        counts = np.ones(right.shape, dtype=bool) if quantity.counts is None else quantity.counts(step)
    except LackingError as lacking:
        return Finding(quantity.name, NOT_JUDGED, lacks=str(lacking))
    except ArithmeticError as problem:
        return Finding(quantity.name, NOT_JUDGED, lacks=f"numbers that it can be computed from ({problem})")
    if recorded.shape != right.shape:
        lacks = f"{right.size:,} numbers: it has {recorded.size:,}"
        return Finding(quantity.name, NOT_JUDGED, lacks=lacks)
    wrong = _wrong(recorded, right, tolerance) & counts
    if not wrong.any():
        return Finding(quantity.name, AGREES, int(counts.sum()), farthest=_farthest(recorded, right, tolerance, counts))
    causes = tuple(_causes(step, quantity, recorded, tolerance=np.where(counts, tolerance, np.inf)))
    return Finding(
        quantity.name,
        DIFFERS,
        int(counts.sum()),
        difference=_difference(step, quantity, (recorded, right, wrong), of=int(counts.sum()), causes=causes),
    )


def _farthest(
    recorded: np.ndarray, right: np.ndarray, tolerance: np.ndarray, counts: np.ndarray
) -> tuple[float, float, float] | None:
    """The two numbers where they are farthest apart, of those that count, and the tolerance; None without any."""
    if not counts.any():
        return None
    most = int(np.argmax(np.where(counts, np.abs(recorded - right), -1.0)))
    at, expected, may = (float(values.reshape(-1)[most]) for values in (recorded, right, tolerance))
    return at, expected, may


def _difference(
    step: AuditedStep,
    quantity: Quantity,
    found: tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    of: int,
    causes: tuple[str, ...],
) -> Difference:
    """found: the recorded numbers, the right ones, and where they differ."""
    recorded, right, wrong = found
    apart = np.where(wrong, np.nan_to_num(np.abs(recorded - right), nan=np.inf), -1.0)
    most = int(np.argmax(apart)) if apart.ndim else 0
    first = int(np.argmax(wrong)) if wrong.ndim else 0
    has_places = bool(quantity.axis) and apart.ndim > 0
    return Difference(
        int(wrong.sum()),
        of,
        float(recorded.reshape(-1)[most]),
        float(right.reshape(-1)[most]),
        step.where(quantity.axis, most) if has_places else "",
        step.where(quantity.axis, first) if has_places else "",
        causes,
    )


def _causes(step: AuditedStep, quantity: Quantity, recorded: np.ndarray, *, tolerance: np.ndarray) -> list[str]:
    """The sentences of the causes that give the recorded numbers."""
    found = []
    for cause in quantity.causes:
        try:
            with np.errstate(all="ignore"):  # a cause that does not apply may divide by 0
                computed = _floats(cause.compute(step))
        except (LackingError, ArithmeticError):  # a rate of 0 is no mistake
            continue
        if computed.shape == recorded.shape and _explains(recorded, computed, tolerance):
            found.append(cause.sentence)
    return found


def _explains(recorded: np.ndarray, computed: np.ndarray, tolerance: np.ndarray) -> bool:
    """True if a cause gives the recorded numbers. NaN: the record lacks what it needs there; most must be known."""
    known = ~np.isnan(computed)
    own = np.fmax(tolerance, FLOAT32 * np.abs(computed))  # a wrong number may be a large one
    judged = known & ~np.isposinf(tolerance)  # NaN: where any number would be wrong
    return bool(2 * known.sum() > known.size and judged.any() and not (_wrong(recorded, computed, own) & judged).any())


def _wrong(recorded: np.ndarray, right: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    """True where a number is not finite: an infinite one makes its own tolerance infinite. Then where it is too far."""
    is_near = (np.abs(recorded - right) <= tolerance) | np.isposinf(tolerance)
    return ~(np.isfinite(recorded) & np.isfinite(right) & is_near)


def _recorded(step: AuditedStep, quantity: Quantity) -> np.ndarray:
    if quantity.recorded is not None:
        return _floats(quantity.recorded(step))
    if quantity.name in FIGURES:
        return _floats(step.figure(quantity.name))
    return _floats(step.recorded(quantity.name))


def _floats(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)
