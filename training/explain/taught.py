"""Lessons: the sequences of the last steps by their effect on held-out responses, to first order.

With f the log-probability of the responses, step k moves the weights by - a_k m_k (`updates`). The gradient of step s
stands in the first moment of step k with beta1^(k - s) (1 - beta1), and its square in the second with
beta2^(k - s) (1 - beta2). So a change of the clipped gradient c g of step s, by element, changes f by

    D_s = (1 - beta1) sum over k >= s of beta1^(k - s) (- a_k) df/dw_k
        + (1 - beta2) c g sum over k >= s of beta2^(k - s) bend_k df/dw_k

and sequence i, whose part of the gradient is g_i, has the effect c g_i . D_s; where the norm was clipped, D_s is
without its part along g, since c falls as the gradient grows. A product with g_i is a derivative of its loss along one
direction of the weights: a forward for all sequences of a step. (Pruthi et al. 2020, TracIn, equation 2, with the
derivative of AdamW's update in place of plain descent.) An effect is what leaving a sequence out would take away.
Effects do not sum to the change, since Adam divides by the gradient's own size; the first line's sums alone, with that
division held, do: a sequence's share. What is left out: how the weights in between change df/dw.

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
    from training.explain.updates import Update, Whole


@dataclass(frozen=True)
class Lesson:
    """A sequence's effect on the log-probability of all responses together, and its share of the change, nats."""

    step: int
    sequence: int
    name: str
    effect: float
    share: float
    ids: np.ndarray


@dataclass(frozen=True)
class Taught:
    """lessons: the largest effect first. told: the sum of their shares. first_order: of all that moved the weights in
    these steps. real: the change itself."""

    lessons: Sequence[Lesson]
    told: float
    first_order: float
    real: float


def taught(steps: Sequence[AuditedStep], held: HeldOutResponses) -> Taught:
    """Return the lessons of steps that follow each other, in their order."""
    lessons: list[Lesson] = []
    first_order = 0.0
    pulls: tuple[Whole, Whole] = ({}, {})
    for step in reversed(steps):
        model, update = model_of(step), update_of(step)
        by_weight = model.gradient(held.sequences, Reads(logprobs_T=held.mask.astype(np.float64)))
        first_order += dot(by_weight, update.whole)
        pulls = (
            _pulled(by_weight, update.scale, pulls[0], update.betas[0]),
            _pulled(by_weight, update.bend, pulls[1], update.betas[1]),
        )
        slopes, sequences = slopes_of(step), sequences_of(step)
        effects, shares = (
            derivative(slopes, model.along(sequences, direction))
            for direction in (_of_effects(update, pulls), _of_shares(update, pulls[0]))
        )
        lessons += _lessons(step, sequences, effects, shares)
    before = held.sums(model_of(steps[0]).read(held.sequences)).sum()
    after = held.sums(model_of(steps[-1], "weights_after.").read(held.sequences)).sum()
    lessons.sort(key=lambda lesson: -lesson.effect)
    return Taught(lessons, sum(lesson.share for lesson in lessons), first_order, float(after - before))


def _pulled(by_weight: Whole, factor: Whole, later: Whole, beta: float) -> Whole:
    """The sum over this step and later ones of beta^(k - s) factor_k df/dw_k."""
    return {name: factor[name] * by_weight[name] + beta * later.get(name, 0.0) for name in factor}


def _of_shares(update: Update, pull: Whole) -> Whole:
    return {name: (1.0 - update.betas[0]) * update.clip * value for name, value in pull.items()}


def _of_effects(update: Update, pulls: tuple[Whole, Whole]) -> Whole:
    first, second = pulls
    beta1, beta2 = update.betas
    direction = {
        name: (1.0 - beta1) * first[name] + (1.0 - beta2) * update.clipped[name] * second[name] for name in first
    }
    if update.clip < 1.0:
        along = dot(direction, update.clipped) / dot(update.clipped, update.clipped)
        direction = {name: value - along * update.clipped[name] for name, value in direction.items()}
    return {name: update.clip * value for name, value in direction.items()}


def _lessons(
    step: AuditedStep, sequences: Sequence[np.ndarray], effects: np.ndarray, shares: np.ndarray
) -> list[Lesson]:
    """effects, shares: by token, or by sequence of a reward model."""
    if step.head.objective != "reward":
        counts = np.repeat(np.arange(len(sequences)), [len(ids) for ids in sequences])
        effects, shares = (np.bincount(counts, values, minlength=len(sequences)) for values in (effects, shares))
    return [
        Lesson(step.head.step, place, step.where("S", place), float(effects[place]), float(shares[place]), ids)
        for place, ids in enumerate(sequences)
    ]
