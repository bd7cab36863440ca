"""The gradient of the loss, from the weights in the record: forward, losses and reduction once more, and backward.

S sequences, T tokens, U units of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from threestep.plugins.audit.quantities.models import (
    JOINED,
    is_rounded,
    joined_gradients,
    joined_logits,
    model_gradients,
    model_logits,
    model_scores,
)
from threestep.plugins.audit.quantities.quantity import Cause, Quantity
from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.audit.references import reductions

if TYPE_CHECKING:
    from threestep.plugins.audit.references.llama import Slopes

_STEP = 1e-5  # of a central difference in float64: exact to about 1e-10
# What a wrong number of a record is explained by: a loss of units [U], and its slopes.
UnitLosses = Callable[[AuditedStep], reductions.Units]
SLOPES: dict[str, Callable[[AuditedStep, reductions.Reduction | None], Slopes]] = {}


def slopes_of_units(units: reductions.Units, reduce: reductions.Reduction) -> np.ndarray:
    """Return [U], the derivative of a reduction by each unit's loss. Reductions are linear in these."""
    found_U = np.zeros(len(units.values_U))
    for place in np.flatnonzero(units.weights_U):
        one_U = np.zeros(len(units.values_U))
        one_U[place] = 1.0
        found_U[place] = reduce(units.with_values(one_U))
    return found_U


def central(compute: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
    """The derivative of `compute` where each entry of its result follows from that of `values` alone."""
    return (compute(values + _STEP) - compute(values - _STEP)) / (2.0 * _STEP)


def _right(step: AuditedStep) -> Slopes:
    return step.cached("slopes", lambda: _slopes(step, None))


def _slopes(step: AuditedStep, reduce: reductions.Reduction | None) -> Slopes:
    """reduce: in place of the right reduction."""
    if step.settings.get("other_terms"):
        raise LackingError("a reference for the other terms of the loss")
    return SLOPES[step.head.objective](step, reduce)


def _both(step: AuditedStep) -> tuple[np.ndarray, np.ndarray]:
    return step.cached("gradients", lambda: model_gradients(step, _right(step)))


def _gradients(step: AuditedStep) -> np.ndarray:
    return _both(step)[0]


def _of(step: AuditedStep, slopes: Slopes) -> np.ndarray:
    return model_gradients(step, slopes)[0]


def _times(share: Callable[[AuditedStep], float]) -> Callable[[AuditedStep], np.ndarray]:
    return lambda step: share(step) * _gradients(step)


def _of_each_rank(step: AuditedStep) -> float:
    return step.micro_batches / step.ranks


def _reduced(mistake: Callable[..., float], step: AuditedStep) -> np.ndarray:
    """The gradient under a wrong reduction of the same losses."""
    right = step.cached("slopes", lambda: _slopes(step, None))
    del right
    return _of(step, _slopes(step, partial(_as_reduction, mistake, step)))


def _as_reduction(mistake: Callable[..., float], step: AuditedStep, units: reductions.Units) -> float:
    from threestep.plugins.audit.quantities.tokens import right_reduction

    own = right_reduction(step) if step.head.objective in ("sft", "policy") else reductions.token_mean
    return mistake(units, own)


def _without_micro_batch(step: AuditedStep, last: bool) -> np.ndarray:
    """One micro-batch of each rank adds nothing: its gradient was dropped."""
    micro_T = step.micro_S[step.sequence_T]
    first = np.array([int(step.micro_S[step.rank_S == rank].min(initial=1 << 30)) for rank in range(step.ranks)])
    final = np.array([int(step.micro_S[step.rank_S == rank].max(initial=0)) for rank in range(step.ranks)])
    dropped_T = np.isin(micro_T, final if last else first)
    return _of(step, _kept(step, ~dropped_T))


def _kept(step: AuditedStep, keep_T: np.ndarray) -> Slopes:
    right = _right(step)
    own = {
        name: getattr(right, name) * keep_T
        for name in ("logprobs_T", "normalizers_T", "entropies_T", "values_T")
        if getattr(right, name) is not None
    }
    if right.scores_S is not None:
        keep_S = np.zeros(len(step.rank_S), dtype=bool)
        keep_S[step.sequence_T[keep_T]] = True
        own["scores_S"] = right.scores_S * keep_S
    return replace(right, **own)


def _of_rank(step: AuditedStep, rank: int) -> np.ndarray:
    """The gradient of one rank's sequences alone: it was not summed over ranks."""
    return _of(step, _kept(step, step.rank_S[step.sequence_T] == rank))


def _with_prompts(step: AuditedStep) -> np.ndarray:
    """Every real token is trained alike, prompts too."""
    right = _right(step)
    if right.logprobs_T is None or step.head.objective != "sft":
        raise LackingError("a loss of tokens")
    inside_T = step.real_T & (step.place_T > 0)
    return _of(step, replace(right, logprobs_T=np.where(inside_T, -1.0 / inside_T.sum(), 0.0)))


def _other_temperature(step: AuditedStep) -> np.ndarray:
    return _of(step, replace(_right(step), temperature=1.0))


def _rounding(step: AuditedStep, right: np.ndarray) -> np.ndarray:
    """A share of the summands' sizes, each and as their mean in the parameter: sums of a backward round by the size of
    what they add, and sequences may cancel each other. Measured on Llamas of 2 layers (README.md)."""
    share, of_parameter = (0.15, 0.3) if is_rounded(step) else (2e-5, 5e-5)
    sizes, begin = _both(step)[1], 0
    whole = float(np.sqrt((sizes**2).mean())) if len(sizes) else 0.0
    found = np.zeros(len(right))
    for values in step.state("gradients.").values():
        own = sizes[begin : begin + values.size]
        mean = float(np.sqrt((own**2).mean())) if values.size else 0.0
        found[begin : begin + values.size] = share * own + of_parameter * mean + 2e-2 * share * whole
        begin += values.size
    return found + 1e-9


_REDUCED: Mapping[str, Callable[..., float]] = {
    sentence: mistake
    for sentence, mistake in reductions.MISTAKES.items()
    if "ranks" not in sentence and "micro-batches once" not in sentence and "number of micro" not in sentence
}
_GRADIENTS = Quantity(
    "gradients",
    ("sft", "reward", "dpo", "policy"),
    _gradients,
    (
        Cause("divided by the number of ranks once more", _times(lambda step: 1.0 / step.ranks)),
        Cause("multiplied by the number of ranks: not divided by it", _times(lambda step: float(step.ranks))),
        Cause("divided by the number of micro-batches once more", _times(lambda step: 1.0 / _of_each_rank(step))),
        Cause("multiplied by the number of micro-batches: not divided by it", _times(_of_each_rank)),
        Cause(
            "divided by the micro-batches of a whole accumulation, of which this step is the last, partial one",
            _times(lambda step: _of_each_rank(step) / float(step.setting("accumulation_steps"))),
        ),
        Cause("the sign is wrong: the loss is maximized", _times(lambda step: -1.0)),
        Cause("the gradient is 0", _times(lambda step: 0.0)),
        Cause("the first micro-batch's gradient is left out", partial(_without_micro_batch, last=False)),
        Cause("the last micro-batch's gradient is left out", partial(_without_micro_batch, last=True)),
        Cause("the gradient of the first rank alone: it is not summed over ranks", partial(_of_rank, rank=0)),
        Cause(
            "the gradient of the first rank alone, divided by the ranks",
            lambda step: _of_rank(step, 0) / step.ranks,
        ),
        Cause("prompts are trained too, though the loss leaves them out", _with_prompts),
        Cause("the temperature is left out", _other_temperature),
        *(
            Cause(sentence, lambda step, own=own: joined_gradients(step, _right(step), restarts=own))  # type: ignore[misc]
            for sentence, own in JOINED.items()
        ),
        *(Cause(f"of another loss: {sentence}", partial(_reduced, mistake)) for sentence, mistake in _REDUCED.items()),
    ),
    _rounding,
    recorded=lambda step: np.concatenate([values.reshape(-1) for values in step.state("gradients.").values()]),
    axis="W",
)
_SCORES = Quantity(
    "scores",
    ("reward",),
    model_scores,
    (
        Cause("the sign is wrong", lambda step: -model_scores(step)),
        Cause("the scores are rounded to bf16", lambda step: _rounded(model_scores(step))),
    ),
    lambda step, right: (0.1 if is_rounded(step) else 2e-5) * (1.0 + np.abs(right)),
    axis="S",
)


def _logits_rounding(step: AuditedStep, right: np.ndarray) -> np.ndarray:
    """A share of 1 + the largest logit of the place: of a whole forward."""
    largest_T1 = np.abs(right).max(axis=1, keepdims=True)
    return (5e-2 if is_rounded(step) else 2e-5) * (1.0 + largest_T1) * np.ones(right.shape)


def _predicted(step: AuditedStep) -> np.ndarray:
    """bool [T, V], the real tokens that another one of their sequence stands before."""
    inside_T = step.real_T & np.roll(step.real_T, 1) & (step.place_T > 0)
    return np.broadcast_to(inside_T[:, None], (len(inside_T), int(step.head.model["vocab_size"])))


_LOGITS = Quantity(
    "logits",
    ("sft", "dpo", "policy"),
    model_logits,
    tuple(Cause(sentence, partial(joined_logits, restarts=own)) for sentence, own in JOINED.items()),
    _logits_rounding,
    lambda step: _predicted(step),
    axis="TV",
)


def _rounded(values: np.ndarray) -> np.ndarray:
    from threestep.plugins.audit.references.logprobs import rounded_to_bfloat16

    return rounded_to_bfloat16(values)


LOGITS, SCORES, GRADIENTS = (_LOGITS,), (_SCORES,), (_GRADIENTS,)


# --- slopes of each objective


def _sft(step: AuditedStep, reduce: reductions.Reduction | None) -> Slopes:
    from threestep.plugins.audit.quantities.tokens import right_reduction
    from threestep.plugins.audit.references.llama import Slopes

    own = right_reduction(step) if reduce is None else reduce
    weights_T = slopes_of_units(step.token_units(np.zeros(len(step.place_T))), own)
    z_coef = float(step.settings.get("z_loss_coef", 0.0))
    normalizers_T = None
    if z_coef:
        normalizers_T = weights_T * z_coef * 2.0 * _normalizers(step)
    temperature = float(step.settings.get("temperature", 1.0))
    return Slopes(-weights_T, normalizers_T, temperature=temperature)


def _normalizers(step: AuditedStep) -> np.ndarray:
    """Return [T], log Z of the logits over the temperature."""
    logits_TV = step.tensor("logits") / float(step.settings.get("temperature", 1.0))
    largest_T1 = logits_TV.max(axis=1, keepdims=True)
    return np.log(np.exp(logits_TV - largest_T1).sum(axis=1)) + largest_T1[:, 0]


def _reward(step: AuditedStep, reduce: reductions.Reduction | None) -> Slopes:
    from threestep.plugins.audit.quantities.pairs import reward_units
    from threestep.plugins.audit.references.llama import Slopes

    own = reductions.token_mean if reduce is None else reduce
    scores_S, found_S = step.tensor("scores"), np.zeros(len(step.rank_S))
    for sequence in range(len(scores_S)):
        moved = []
        for way in (_STEP, -_STEP):
            own_S = scores_S.copy()
            own_S[sequence] += way
            moved.append(own(reward_units(step.replaced(scores=own_S))))
        found_S[sequence] = (moved[0] - moved[1]) / (2.0 * _STEP)
    return Slopes(scores_S=found_S)


SLOPES |= {"sft": _sft, "reward": _reward}


def _dpo(step: AuditedStep, reduce: reductions.Reduction | None) -> Slopes:
    """By the sums of log-probabilities, weighted and plain, and by these through each token."""
    from threestep.plugins.audit.quantities import pairs
    from threestep.plugins.audit.references.llama import Slopes

    own = reductions.token_mean if reduce is None else reduce
    mask_T, tails_T = step.tensor("loss_mask").astype(np.float64), pairs.tail_weights(step)
    read_T = np.where(mask_T > 0, step.tensor("logprobs"), 0.0)
    sums = {"sums_S": step.sequence_sums(read_T), "weighted_S": step.sequence_sums(tails_T * read_T)}
    right, term = pairs.responses_of(step), pairs.constants_of(step)
    right = replace(right, **sums)
    found = {name: np.zeros(len(step.rank_S)) for name in sums}
    for name, values_S in sums.items():
        for sequence in range(len(values_S)):
            moved = []
            for way in (_STEP, -_STEP):
                other_S = values_S.copy()
                other_S[sequence] += way
                losses_U = pairs.losses_of(step, replace(right, **{name: other_S}), term)
                moved.append(own(pairs.units_of(step, losses_U)))
            found[name][sequence] = (moved[0] - moved[1]) / (2.0 * _STEP)
    by_token_T = found["sums_S"][step.sequence_T] + tails_T * found["weighted_S"][step.sequence_T]
    return Slopes(mask_T * by_token_T)


SLOPES |= {"dpo": _dpo}


def _policy(step: AuditedStep, reduce: reductions.Reduction | None) -> Slopes:
    """By each log-probability. A token's may move the losses of its own sequence, so that one token of each sequence is
    moved at a time."""
    from threestep.plugins.audit.quantities.policies import policy_value
    from threestep.plugins.audit.quantities.tokens import right_reduction
    from threestep.plugins.audit.references.llama import Slopes

    step.setting("policy_loss")
    own = right_reduction(step) if reduce is None else reduce
    weights_T = slopes_of_units(step.token_units(np.zeros(len(step.place_T))), own)
    read_T, counted_T = step.tensor("logprobs"), step.tensor("loss_mask")
    order_T = np.cumsum(counted_T)
    before_S = np.concatenate([[0], order_T])[np.cumsum([0, *step.tensor("lengths")])[:-1]]
    order_T = np.where(counted_T, order_T - before_S[step.sequence_T], 0)
    found_T = np.zeros(len(read_T))
    for place in range(1, int(order_T.max(initial=0)) + 1):
        moved_T = order_T == place
        parts = [weights_T * policy_value(step, read_T + way * moved_T) for way in (_STEP, -_STEP)]
        slope_S = step.sequence_sums(parts[0] - parts[1]) / (2.0 * _STEP)
        found_T[moved_T] = slope_S[step.sequence_T[moved_T]]
    entropy = float(step.settings.get("entropy_coef", 0.0))
    entropies_T = -entropy * weights_T if entropy else None
    return Slopes(found_T, None, entropies_T, temperature=float(step.settings.get("temperature", 1.0)))


SLOPES |= {"policy": _policy}
