"""AdamW's update taken apart: the parts that moved the weights in a step.

Loshchilov and Hutter 2019, algorithm 2, lines 6 to 12. With m the first moment, c the factor of clipping and
a = rate / (1 - beta1^t) / (sqrt(v_hat) + epsilon), a weight moves by

    - a (1 - beta1) c g     this step's gradient
    - a beta1 m             the gradients of earlier steps
    - rate decay w          weight decay
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from threestep.plugins.audit.quantities.optimizer import rate_share
from threestep.plugins.audit.references import adamw

if TYPE_CHECKING:
    from collections.abc import Mapping

    from threestep.plugins.audit.quantities.step import AuditedStep

Whole = dict[str, np.ndarray]


@dataclass(frozen=True)
class Update:
    """By parameter. whole: weights after, less weights before. gradient, earlier, decay: its parts. plain: this step's
    clipped gradient times the rate, as plain gradient descent would have gone. shrinks: the decay over the weight.
    scale: - a, what the first moment is multiplied by. clip: c. beta1: the share of the first moment that a later step
    takes over."""

    whole: Whole
    gradient: Whole
    earlier: Whole
    decay: Whole
    plain: Whole
    shrinks: Mapping[str, float]
    scale: Whole
    clip: float
    beta1: float

    @property
    def taken(self) -> float:
        """The share of the gradient that goes into the first moment."""
        return (1.0 - self.beta1) * self.clip

    @property
    def rounding(self) -> Whole:
        """The rest that the parts leave: rounding of the weights."""
        return {
            name: value - self.gradient[name] - self.earlier[name] - self.decay[name]
            for name, value in self.whole.items()
        }


def update_of(step: AuditedStep, gradients: Whole | None = None) -> Update:
    """Take the update of a record apart; LackingError for one without the values of its state. gradients: in place of
    the recorded ones, by which the update then goes."""
    before, first, second = (step.state(kind) for kind in ("weights_before.", "exp_avg.", "exp_avg_sq."))
    after = step.state("weights_after.") if gradients is None else None
    gradients = step.state("gradients.") if gradients is None else gradients
    beta1, beta2 = (float(step.setting(name)) for name in ("beta1", "beta2"))
    count = float(step.setting("updates_before")) + 1.0
    clip = adamw.clip_factor(adamw.norm(list(gradients.values())), float(step.setting("max_grad_norm")))
    shrinks = dict[str, float]()
    parts: dict[str, Whole] = {name: {} for name in ("whole", "gradient", "earlier", "decay", "plain", "scale")}
    for name, gradient in gradients.items():
        rate = step.figure("learning_rate") * rate_share(step, name)
        second_after = beta2 * second[name] + (1.0 - beta2) * (clip * gradient) ** 2
        root = np.sqrt(second_after / (1.0 - beta2**count)) + float(step.setting("adam_epsilon"))
        scale = rate / (1.0 - beta1**count) / root
        shrinks[name] = -rate * float(step.setting("weight_decay")) * (before[name].ndim >= 2)
        parts["scale"][name] = -scale
        parts["gradient"][name] = -scale * (1.0 - beta1) * clip * gradient
        parts["earlier"][name] = -scale * beta1 * first[name]
        parts["decay"][name] = shrinks[name] * before[name]
        parts["plain"][name] = -rate * clip * gradient
        parts["whole"][name] = (
            parts["gradient"][name] + parts["earlier"][name] + parts["decay"][name]
            if after is None
            else after[name] - before[name]
        )
    return Update(**parts, shrinks=shrinks, clip=clip, beta1=beta1)


def dot(one: Whole, other: Whole) -> float:
    """The inner product over the parameters that both have."""
    return float(sum(np.vdot(one[name], other[name]) for name in one if name in other))


def cosine(one: Whole, other: Whole) -> float:
    """The cosine of the angle between two updates; 0 if one is 0."""
    size = np.sqrt(dot(one, one) * dot(other, other))
    return dot(one, other) / float(size) if size else 0.0
