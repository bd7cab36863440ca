"""The optimizer's step: the gradient's norm, clipping, the learning rate, AdamW's update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from training.audit.quantities.quantity import Cause, Quantity
from training.audit.references import adamw

if TYPE_CHECKING:
    from training.audit.quantities.step import AuditedStep

_ALL = ("sft", "reward", "dpo", "policy")
Whole = dict[str, np.ndarray]


def _gradients(step: AuditedStep) -> Whole:
    return step.state("gradients.")


def _norm(step: AuditedStep) -> float:
    return adamw.norm([*_gradients(step).values()])


def _matrices(whole: Whole) -> list[np.ndarray]:
    return [values for values in whole.values() if values.ndim >= 2]


_NORM = Quantity(
    "grad_norm",
    _ALL,
    _norm,
    (
        Cause("the norm after clipping", lambda step: _norm(step) * adamw.clip_factor(_norm(step), _most(step))),
        Cause(
            "the sum of the parameters' norms", lambda step: sum(adamw.norm([one]) for one in _gradients(step).values())
        ),
        Cause(
            "the largest of the parameters' norms",
            lambda step: max(adamw.norm([one]) for one in _gradients(step).values()),
        ),
        Cause("the square of the norm", lambda step: _norm(step) ** 2),
        Cause("divided by the number of ranks", lambda step: _norm(step) / step.ranks),
        Cause("multiplied by the number of ranks", lambda step: _norm(step) * step.ranks),
        Cause("divided by the root of the number of ranks", lambda step: _norm(step) / np.sqrt(step.ranks)),
        Cause("multiplied by the root of the number of ranks", lambda step: _norm(step) * np.sqrt(step.ranks)),
        Cause("divided by the number of micro-batches", lambda step: _norm(step) / _accumulated(step)),
        Cause("multiplied by the number of micro-batches", lambda step: _norm(step) * _accumulated(step)),
        Cause("the norm of matrices alone", lambda step: adamw.norm(_matrices(_gradients(step)))),
    ),
    lambda step, right: 1e-4 * right,
)


def _most(step: AuditedStep) -> float:
    return float(step.setting("max_grad_norm"))


def _accumulated(step: AuditedStep) -> float:
    return step.micro_batches / step.ranks


def _flat(whole: Whole) -> np.ndarray:
    return np.concatenate([values.reshape(-1) for values in whole.values()])


def _recorded(kind: str) -> Callable[[AuditedStep], np.ndarray]:
    return lambda step: _flat(step.state(kind))


def _clipped(step: AuditedStep, of: Callable[[Whole], Whole] | None = None) -> np.ndarray:
    if of is not None:
        return _flat(of(_gradients(step)))
    return adamw.clip_factor(_norm(step), _most(step)) * _flat(_gradients(step))


def _each_by_its_norm(step: AuditedStep) -> np.ndarray:
    return _clipped(
        step,
        lambda whole: {name: one * adamw.clip_factor(adamw.norm([one]), _most(step)) for name, one in whole.items()},
    )


_CLIPPED = Quantity(
    "clipped_gradients",
    _ALL,
    _clipped,
    (
        Cause("gradients are not clipped", lambda step: _flat(_gradients(step))),
        Cause("each parameter is clipped by its own norm", _each_by_its_norm),
        Cause(
            "each number is clipped, not the norm",
            lambda step: np.clip(_flat(_gradients(step)), -_most(step), _most(step)),
        ),
        Cause(
            "gradients are scaled to the bound, also below it",
            lambda step: _flat(_gradients(step)) * _most(step) / _norm(step),
        ),
        Cause(
            "gradients are clipped by the norm of one micro-batch's share",
            lambda step: _flat(_gradients(step)) * adamw.clip_factor(_norm(step) * _accumulated(step), _most(step)),
        ),
    ),
    lambda step, right: 1e-4 * np.abs(right) + 1e-6 * float(np.abs(right).max(initial=0.0)),
    recorded=_recorded("clipped_gradients."),
)


def _rate(step: AuditedStep, late: float = 0.0, warmup: float | None = None) -> float:
    """The rate of the schedule. late: steps."""
    before = float(step.head.step) - 1.0
    own = float(step.setting("warmup_steps")) if warmup is None else warmup
    share = adamw.share_of_peak(str(step.setting("schedule")), before - late, own, float(step.setting("total_steps")))
    return float(step.setting("peak_learning_rate")) * share


_RATE = Quantity(
    "learning_rate",
    _ALL,
    _rate,
    (
        Cause("the learning rate is one step late", lambda step: _rate(step, 1.0)),
        Cause("the learning rate is one step early", lambda step: _rate(step, -1.0)),
        Cause("the warm-up is left out", lambda step: _rate(step, warmup=0.0)),
        Cause(
            "the schedule counts micro-batches",
            lambda step: _rate(step, -(step.head.step - 1.0) * (_accumulated(step) - 1.0)),
        ),
        Cause(
            "the schedule counts every rank's steps",
            lambda step: _rate(step, -(step.head.step - 1.0) * (step.ranks - 1.0)),
        ),
        Cause("the peak, without a schedule", lambda step: float(step.setting("peak_learning_rate"))),
    ),
    lambda step, right: 1e-6 * float(step.setting("peak_learning_rate")),
)


def _constants(step: AuditedStep) -> adamw.AdamW:
    names = ("beta1", "beta2", "adam_epsilon", "weight_decay", "updates_before")
    return adamw.AdamW(step.figure("learning_rate"), *(float(step.setting(name)) for name in names))


def _given(step: AuditedStep) -> Whole:
    """The gradients that the optimizer was given."""
    try:
        return step.state("clipped_gradients.")
    except LookupError:
        return _gradients(step)


def _updated(
    step: AuditedStep,
    constants: adamw.AdamW | None = None,
    *,
    gradients: Whole | None = None,
    decays: Callable[[np.ndarray], bool] = lambda weight: weight.ndim >= 2,
    l2: bool = False,
) -> np.ndarray:
    """Return the weights after the update. decays: which parameters decay. l2: decay by way of the gradient."""
    own = _constants(step) if constants is None else constants
    gradients = _given(step) if gradients is None else gradients
    before, first, second = (step.state(kind) for kind in ("weights_before.", "exp_avg.", "exp_avg_sq."))
    found = {}
    for name, weight in before.items():
        decay = own.decay if decays(weight) else 0.0
        gradient = gradients[name] + (decay * weight if l2 else 0.0)
        rule = replace(own, decay=0.0 if l2 else decay)
        found[name] = rule.after(weight, gradient, first[name], second[name])
    return _flat(found)


def _with(**changes: float) -> Callable[[AuditedStep], np.ndarray]:
    return lambda step: _updated(step, replace(_constants(step), **changes))


def _other_rate(step: AuditedStep, late: float) -> np.ndarray:
    return _updated(step, replace(_constants(step), rate=_rate(step, late)))


def _without_history_count(step: AuditedStep) -> np.ndarray:
    """No bias correction: as if there had been very many updates."""
    return _updated(step, replace(_constants(step), updates_before=1e9))


def _decay_without_rate(step: AuditedStep) -> np.ndarray:
    constants = _constants(step)
    return _updated(step, replace(constants, decay=constants.decay / constants.rate))


_UPDATE = Quantity(
    "weights_after",
    _ALL,
    _updated,
    (
        Cause(
            "weight decay on vectors: norms and biases decay too",
            lambda step: _updated(step, decays=lambda weight: True),
        ),
        Cause("nothing decays", lambda step: _updated(step, decays=lambda weight: False)),
        Cause("vectors alone decay", lambda step: _updated(step, decays=lambda weight: weight.ndim < 2)),
        Cause("the decay is in the gradient: Adam with L2, not AdamW", lambda step: _updated(step, l2=True)),
        Cause("the decay is not scaled by the learning rate", _decay_without_rate),
        Cause(
            "the optimizer was given gradients that are not clipped",
            lambda step: _updated(step, gradients=_gradients(step)),
        ),
        Cause("the learning rate of the step before", lambda step: _other_rate(step, 1.0)),
        Cause("the learning rate of the step after", lambda step: _other_rate(step, -1.0)),
        Cause("no bias correction", _without_history_count),
        Cause("the bias correction is one update ahead", lambda step: _shifted_count(step, 1.0)),
        Cause("the bias correction is one update behind", lambda step: _shifted_count(step, -1.0)),
        Cause("no first moment (beta1 is 0)", _with(beta1=0.0)),
        Cause("epsilon is 1e-8", _with(epsilon=1e-8)),
        Cause("epsilon is 1e-6", _with(epsilon=1e-6)),
        Cause("the betas are AdamW's usual 0.9 and 0.999", _with(beta1=0.9, beta2=0.999)),
        Cause("the betas are 0.9 and 0.95", _with(beta1=0.9, beta2=0.95)),
        Cause("the weights did not change", lambda step: _flat(step.state("weights_before."))),
        Cause(
            "plain gradient descent",
            lambda step: _flat(step.state("weights_before.")) - _constants(step).rate * _flat(_given(step)),
        ),
    ),
    lambda step, right: 1.5e-7 * np.abs(right) + 2e-4 * _constants(step).rate,
    recorded=_recorded("weights_after."),
)


def _shifted_count(step: AuditedStep, by: float) -> np.ndarray:
    constants = _constants(step)
    return _updated(step, replace(constants, updates_before=max(constants.updates_before + by, 0.0)))


QUANTITIES = (_NORM, _CLIPPED, _RATE, _UPDATE)
