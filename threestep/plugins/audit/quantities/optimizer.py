"""The optimizer's step: the gradient's norm, clipping, the learning rate, AdamW's update."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from threestep.plugins.audit.quantities.quantity import Cause, Quantity
from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.audit.references import adamw

if TYPE_CHECKING:
    from collections.abc import Callable

_ALL = ("sft", "reward", "dpo", "policy")
Whole = dict[str, np.ndarray]


def _gradients(step: AuditedStep) -> Whole:
    return step.state("gradients.")


def _norms(step: AuditedStep) -> dict[str, float]:
    return step.norms("gradients.")


def _norm(step: AuditedStep) -> float:
    return adamw.norm([np.array(list(_norms(step).values()))])


def _nearest(step: AuditedStep, times: float) -> float:
    """The norm with one parameter once more, or once less: the one that comes nearest to what is recorded."""
    squares = np.array(list(_norms(step).values())) ** 2
    found = np.sqrt(np.maximum(squares.sum() + times * squares, 0.0))
    return float(found[np.argmin(np.abs(found - step.figure("grad_norm")))])


def _matrix_norm(step: AuditedStep) -> float:
    return adamw.norm([values for values in _gradients(step).values() if values.ndim >= 2])


_NORM = Quantity(
    "grad_norm",
    _ALL,
    _norm,
    (
        Cause("the norm after clipping", lambda step: _norm(step) * adamw.clip_factor(_norm(step), _most(step))),
        Cause("the sum of the parameters' norms", lambda step: sum(_norms(step).values())),
        Cause("the largest of the parameters' norms", lambda step: max(_norms(step).values())),
        Cause("the square of the norm", lambda step: _norm(step) ** 2),
        Cause("divided by the number of ranks", lambda step: _norm(step) / step.ranks),
        Cause("multiplied by the number of ranks", lambda step: _norm(step) * step.ranks),
        Cause("divided by the root of the number of ranks", lambda step: _norm(step) / np.sqrt(step.ranks)),
        Cause("multiplied by the root of the number of ranks", lambda step: _norm(step) * np.sqrt(step.ranks)),
        Cause("divided by the number of micro-batches", lambda step: _norm(step) / _accumulated(step)),
        Cause("multiplied by the number of micro-batches", lambda step: _norm(step) * _accumulated(step)),
        Cause("the norm of matrices alone", _matrix_norm),
        Cause("a parameter counts twice: a tied weight has two names", lambda step: _nearest(step, 1.0)),
        Cause("a parameter is left out", lambda step: _nearest(step, -1.0)),
    ),
    lambda step, right: 1e-4 * right,
)


def _most(step: AuditedStep) -> float:
    return float(step.setting("max_grad_norm"))


def _accumulated(step: AuditedStep) -> float:
    return step.micro_batches / step.ranks


def flat(whole: Whole) -> np.ndarray:
    """All numbers, parameter after parameter by name."""
    return np.concatenate([whole[name].reshape(-1) for name in sorted(whole)])


def _recorded_clipped(step: AuditedStep) -> np.ndarray:
    return flat(_given(step))


def _given(step: AuditedStep) -> Whole:
    """The gradients that the optimizer was given: recorded, or what Adam's first moment has taken of them:
    (m - beta1 m_before) / (1 - beta1)."""
    if step.has_state("clipped_gradients."):
        return step.state("clipped_gradients.")
    if not step.has_state("exp_avg_after."):
        return _gradients(step)
    before, beta1 = step.state("exp_avg."), float(step.setting("beta1"))
    after = step.state("exp_avg_after.")
    return {name: (after[name] - beta1 * before[name]) / (1.0 - beta1) for name in after}


def _clipped_rounding(step: AuditedStep, right: np.ndarray) -> np.ndarray:
    """A gradient out of moments carries the rounding of both, which is that of the larger."""
    most = float(np.abs(right).max(initial=0.0))
    plain = 1e-4 * np.abs(right) + 1e-6 * most
    if step.has_state("clipped_gradients.") or not step.has_state("exp_avg_after."):
        return plain
    moments = np.abs(flat(step.state("exp_avg.")))
    units = 2.0**-8 if step.settings.get("master_dtype") == "bf16" else 2.0**-23
    return plain + 2.0 * units * (moments / (1.0 - float(step.setting("beta1"))) + np.abs(right))


def _clipped(step: AuditedStep, of: Callable[[Whole], Whole] | None = None) -> np.ndarray:
    if of is not None:
        return flat(of(_gradients(step)))
    return adamw.clip_factor(_norm(step), _most(step)) * flat(_gradients(step))


def _each_by_its_norm(step: AuditedStep) -> np.ndarray:
    return _clipped(
        step,
        lambda whole: {name: one * adamw.clip_factor(adamw.norm([one]), _most(step)) for name, one in whole.items()},
    )


def _of_other_moment(step: AuditedStep, beta: float) -> np.ndarray:
    """The gradient that a moment made with another beta seems to have taken."""
    if step.has_state("clipped_gradients."):
        raise LackingError("a gradient out of moments")
    before, own = flat(step.state("exp_avg.")), float(step.setting("beta1"))
    after = beta * before + (1.0 - beta) * _clipped(step)
    return (after - own * before) / (1.0 - own)


def _with_decay(step: AuditedStep) -> np.ndarray:
    decay = float(step.setting("weight_decay"))
    if not decay:
        raise LackingError("a decay")
    weights = _trained(step)
    return _clipped(step) + decay * flat({name: one * (one.ndim >= 2) for name, one in weights.items()})


def _clipped_to(step: AuditedStep, most: float) -> np.ndarray:
    return adamw.clip_factor(_norm(step), most) * flat(_gradients(step))


_CLIPPED = Quantity(
    "clipped_gradients",
    _ALL,
    _clipped,
    (
        Cause("gradients are not clipped", lambda step: flat(_gradients(step))),
        Cause("each parameter is clipped by its own norm", _each_by_its_norm),
        Cause(
            "each number is clipped, not the norm",
            lambda step: np.clip(flat(_gradients(step)), -_most(step), _most(step)),
        ),
        Cause(
            "gradients are scaled to the bound, also below it",
            lambda step: flat(_gradients(step)) * _most(step) / _norm(step),
        ),
        *(
            Cause(f"the first moment is made with beta1 {beta:g}", partial(_of_other_moment, beta=beta))
            for beta in (0.0, 0.8, 0.9, 0.95, 0.99)
        ),
        Cause("the decay is in the gradient: Adam with L2, not AdamW", lambda step: _with_decay(step)),
        Cause("gradients are clipped to another norm: 1", lambda step: _clipped_to(step, 1.0)),
        Cause("gradients are divided by the ranks once more", lambda step: _clipped(step) / step.ranks),
        Cause("gradients are multiplied by the ranks", lambda step: _clipped(step) * step.ranks),
        Cause("gradients are 0", lambda step: np.zeros(flat(_gradients(step)).shape)),
        Cause(
            "gradients are clipped by the norm of one micro-batch's share",
            lambda step: flat(_gradients(step)) * adamw.clip_factor(_norm(step) * _accumulated(step), _most(step)),
        ),
    ),
    _clipped_rounding,
    recorded=_recorded_clipped,
    axis="W",
)


def _before(step: AuditedStep) -> float:
    """The updates before this one."""
    return float(step.settings.get("updates_before", float(step.head.step) - 1.0))


def _rate(step: AuditedStep, late: float = 0.0, **changes: float) -> float:
    """The rate of the schedule. late: steps."""
    names = {"init": "init_lr_ratio", "least": "min_lr_ratio", "cycles": "num_cycles", "stable": "stable_ratio"}
    given = {name: float(step.settings[setting]) for name, setting in names.items() if setting in step.settings}
    warmup, total = float(step.setting("warmup_steps")), float(step.setting("total_steps"))
    shape = adamw.RateShape(**{"warmup": warmup, "total": total, **given, **changes})
    share = adamw.share_of_peak(str(step.setting("schedule")), max(_before(step) - late, 0.0), shape)
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
            lambda step: _rate(step, -_before(step) * (_accumulated(step) - 1.0)),
        ),
        Cause(
            "the schedule counts every rank's steps",
            lambda step: _rate(step, -_before(step) * (step.ranks - 1.0)),
        ),
        Cause("the peak, without a schedule", lambda step: float(step.setting("peak_learning_rate"))),
    ),
    lambda step, right: 1e-6 * float(step.setting("peak_learning_rate")),
)


def _constants(step: AuditedStep) -> adamw.AdamW:
    names = ("beta1", "beta2", "adam_epsilon", "weight_decay", "updates_before")
    return adamw.AdamW(step.figure("learning_rate"), *(float(step.setting(name)) for name in names))


def _updated(
    step: AuditedStep,
    constants: adamw.AdamW | None = None,
    *,
    gradients: Whole | None = None,
    decays: Callable[[np.ndarray], bool] = lambda weight: weight.ndim >= 2,
    l2: bool = False,
    inside_root: bool = False,
) -> np.ndarray:
    """Return the weights after the update. decays: which parameters decay. l2: decay by way of the gradient."""
    own = _constants(step) if constants is None else constants
    gradients = _given(step) if gradients is None else gradients
    before, first, second = (step.state(kind) for kind in ("weights_before.", "exp_avg.", "exp_avg_sq."))
    found = {}
    for name in first:  # frozen weights have none
        weight = before[name]
        decay = own.decay if decays(weight) else 0.0
        gradient = gradients[name] + (decay * weight if l2 else 0.0)
        rule = replace(own, decay=0.0 if l2 else decay, rate=own.rate * rate_share(step, name))
        found[name] = rule.after(weight, gradient, first[name], second[name], inside_root=inside_root)
    return flat(found)


def rate_share(step: AuditedStep, name: str) -> float:
    """The parameter's rate over the step's: LoRA's adapters may have one of their own."""
    if "adapter_learning_rate" not in step.settings or ".lora_" not in name:
        return 1.0
    return float(step.settings["adapter_learning_rate"]) / float(step.setting("peak_learning_rate"))


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
        Cause("Adam's epsilon is inside the square root", lambda step: _updated(step, inside_root=True)),
        Cause("the decay is not scaled by the learning rate", _decay_without_rate),
        Cause(
            "the optimizer received gradients that are not clipped",
            lambda step: _updated(step, gradients=_gradients(step)),
        ),
        Cause("the learning rate is the previous step's", lambda step: _other_rate(step, 1.0)),
        Cause("the learning rate is the next step's", lambda step: _other_rate(step, -1.0)),
        Cause("no bias correction", _without_history_count),
        Cause("the bias correction is one update ahead", lambda step: _shifted_count(step, 1.0)),
        Cause("the bias correction is one update behind", lambda step: _shifted_count(step, -1.0)),
        Cause("no first moment (beta1 is 0)", _with(beta1=0.0)),
        Cause("epsilon is 1e-8", _with(epsilon=1e-8)),
        Cause("epsilon is 1e-6", _with(epsilon=1e-6)),
        Cause("the betas are AdamW's usual 0.9 and 0.999", _with(beta1=0.9, beta2=0.999)),
        Cause("the betas are 0.9 and 0.95", _with(beta1=0.9, beta2=0.95)),
        Cause("the weights did not change", lambda step: flat(_trained(step))),
        Cause(
            "plain gradient descent",
            lambda step: flat(_trained(step)) - _constants(step).rate * flat(_given(step)),
        ),
    ),
    lambda step, right: _update_rounding(step, right),
    recorded=lambda step: flat(step.state("weights_after.")),
    axis="W",
)


def _update_rounding(step: AuditedStep, right: np.ndarray) -> np.ndarray:
    """A unit of the weight, and of the update, which is about the rate, what rounding of the moments does to it."""
    weight, update = (2.0**-8, 0.3) if step.settings.get("master_dtype") == "bf16" else (1.5e-7, 2e-4)
    rates = [np.full(values.size, rate_share(step, name)) for name, values in step.state("exp_avg.").items()]
    return weight * np.abs(right) + update * _constants(step).rate * np.concatenate(rates)


def _trained(step: AuditedStep) -> Whole:
    """The weights before, without frozen ones."""
    before = step.state("weights_before.")
    return {name: before[name] for name in step.state("exp_avg.")}


def _shifted_count(step: AuditedStep, by: float) -> np.ndarray:
    constants = _constants(step)
    return _updated(step, replace(constants, updates_before=max(constants.updates_before + by, 0.0)))


QUANTITIES = (_NORM, _CLIPPED, _RATE, _UPDATE)
