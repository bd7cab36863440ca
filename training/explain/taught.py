"""Lessons: the sequences of the last steps by their effect on held-out responses, to first order.

With f the log-probability of the responses, step k moves the weights by a_k times its first moment (`updates`), and the
gradient of step s stands in it with beta1^(k - s) (1 - beta1) c_s. So sequence i of step s, whose part of the gradient
is g_i, moved f by

    g_i . (1 - beta1) c_s sum over k >= s of beta1^(k - s) (- a_k) df/dw_k

which is a derivative of its loss along one direction of the weights: a forward for all sequences of a step. (Pruthi et
al. 2020, TracIn, equation 2, with AdamW's update in place of plain descent.) What is left out: the gradient's part in
the second moment of its own and of later steps, and how the weights in between change df/dw.

S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from training.explain.model import Reads
from training.explain.shares import derivative, model_of, sequences_of, slopes_of
from training.explain.updates import dot, update_of

if TYPE_CHECKING:
    from training.audit.quantities.step import AuditedStep
    from training.explain.held_out import HeldOutResponses
    from training.explain.updates import Whole


@dataclass(frozen=True)
class Lesson:
    """A sequence's effect on the log-probability of all responses together, nats. text: None without a tokenizer."""

    step: int
    sequence: int
    name: str
    effect: float
    ids: np.ndarray


@dataclass(frozen=True)
class Taught:
    """lessons: the largest effect first. told: their sum. first_order: of all that moved the weights in these steps.
    real: the change itself."""

    lessons: Sequence[Lesson]
    told: float
    first_order: float
    real: float


def taught(steps: Sequence[AuditedStep], held: HeldOutResponses) -> Taught:
    """Return the lessons of steps that follow each other, in their order."""
    lessons: list[Lesson] = []
    first_order, pull = 0.0, dict[str, np.ndarray]()
    for step in reversed(steps):
        model, update = model_of(step), update_of(step)
        mask = held.mask.astype(np.float64)
        by_weight = model.gradient(held.sequences, Reads(logprobs_T=mask))
        first_order += dot(by_weight, update.whole)
        pull = _pulled(by_weight, update.scale, pull, update.beta1)
        direction = {name: update.taken * value for name, value in pull.items()}
        slopes, sequences = slopes_of(step), sequences_of(step)
        lessons += _lessons(step, sequences, derivative(slopes, model.along(sequences, direction)))
    before = held.sums(model_of(steps[0]).read(held.sequences)).sum()
    after = held.sums(model_of(steps[-1], "weights_after.").read(held.sequences)).sum()
    lessons.sort(key=lambda lesson: -lesson.effect)
    return Taught(lessons, sum(lesson.effect for lesson in lessons), first_order, float(after - before))


def _pulled(by_weight: Whole, scale: Whole, later: Whole, beta1: float) -> Whole:
    """The sum over this step and later ones of beta1^(k - s) (- a_k) df/dw_k."""
    return {name: scale[name] * by_weight[name] + beta1 * later.get(name, 0.0) for name in scale}


def _lessons(step: AuditedStep, sequences: Sequence[np.ndarray], effects: np.ndarray) -> list[Lesson]:
    """effects: by token, or by sequence of a reward model."""
    if len(effects) != len(sequences) or step.head.objective != "reward":
        counts = np.repeat(np.arange(len(sequences)), [len(ids) for ids in sequences])
        effects = np.bincount(counts, effects, minlength=len(sequences))
    return [
        Lesson(step.head.step, place, step.where("S", place), float(effects[place]), ids)
        for place, ids in enumerate(sequences)
    ]
