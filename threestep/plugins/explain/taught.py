"""Lessons: the sequences of the last steps by their effect on held-out responses, to first order in the weights.

With f the log-probability of the responses, step k moves the weights by - a_k m_k (`updates`), and f by df/dw_k times
that. Sequence i of step s, whose part of the gradient is g_i, is left out of g: clipping, moments and Adam's root are
made again, exactly, and what the update then lacks is its effect. In later steps it stands in the first moment:

    effect = df/dw_s . (u_s(g) - u_s(g - g_i)) + (1 - beta1) c_s g_i . sum over k > s of beta1^(k - s) (- a_k) df/dw_k

(Pruthi et al. 2020, TracIn, equation 2, with AdamW's update in place of plain descent.) Adam divides by the gradient's
own size, so that effects do not sum to the change: where sequences agree, the others do the work of one that is left
out. A sequence's share, which has the second term from k = s on, does sum to it. What is left out: how the weights in
between change df/dw, and g_i in the second moments of later steps.

S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from threestep.plugins.explain.forward.model import Reads, read_sequences
from threestep.plugins.explain.shares import model_of, slopes_of
from threestep.plugins.explain.updates import dot, update_of

if TYPE_CHECKING:
    from threestep.plugins.audit.quantities.step import AuditedStep
    from threestep.plugins.explain.forward.model import RecordedModel
    from threestep.plugins.explain.held_out import HeldOutResponses
    from threestep.plugins.explain.updates import Update, Whole


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
    first_order, later = 0.0, dict[str, np.ndarray]()
    for step in reversed(steps):
        model, update = model_of(step), update_of(step)
        by_weight = model.gradient(held.sequences, Reads(logprobs_T=held.mask.astype(np.float64)))
        first_order += dot(by_weight, update.whole)
        pulls = _Pulls(
            by_weight,
            {name: update.beta1 * later[name] if later else np.zeros_like(own) for name, own in update.scale.items()},
        )
        lessons += _lessons(step, model, update, pulls)
        later = {name: update.scale[name] * by_weight[name] + pulls.later[name] for name in update.scale}
    before = held.sums(model_of(steps[0]).read(held.sequences)).sum()
    after = held.sums(model_of(steps[-1], "weights_after.").read(held.sequences)).sum()
    lessons.sort(key=lambda lesson: -lesson.effect)
    return Taught(lessons, sum(lesson.share for lesson in lessons), first_order, float(after - before))


@dataclass(frozen=True)
class _Pulls:
    """by_weight: df/dw of the step. later: the sum over k > s of beta1^(k - s) (- a_k) df/dw_k."""

    by_weight: Whole
    later: Whole


def _lessons(step: AuditedStep, model: RecordedModel, update: Update, pulls: _Pulls) -> list[Lesson]:
    slopes, sequences = slopes_of(step), read_sequences(step)
    gradients = step.state("gradients.")
    whole = dot(pulls.by_weight, update_of(step, gradients).whole)
    found = []
    for place, ids in enumerate(sequences):
        own = model.gradient([ids], one_sequence(slopes, sequences, place))
        rest = {name: value - own[name] for name, value in gradients.items()}
        carried = update.taken * dot(own, pulls.later)
        effect = whole - dot(pulls.by_weight, update_of(step, rest).whole) + carried
        now = sum(float((own[name] * scale * pulls.by_weight[name]).sum()) for name, scale in update.scale.items())
        found.append(Lesson(step.head.step, place, step.where("S", place), effect, update.taken * now + carried, ids))
    return found


def one_sequence(slopes: Reads, sequences: Sequence[np.ndarray], place: int) -> Reads:
    """The slopes of one sequence."""
    begin = sum(len(ids) for ids in sequences[:place])
    own = slice(begin, begin + len(sequences[place]))
    by_token = {
        name: None if (values := getattr(slopes, name)) is None else values[own]
        for name in ("logprobs_T", "normalizers_T", "entropies_T")
    }
    return Reads(**by_token, scores_S=None if slopes.scores_S is None else slopes.scores_S[place : place + 1])
