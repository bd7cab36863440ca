"""The minibatch of step 3: what it was handed of the rollout, and its losses. T tokens, R drawn tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.audit.quantities.quantity import Cause, Quantity, of_loss
from threestep.plugins.audit.quantities.rollouts import estimated_kl
from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.audit.quantities.tokens import loss_tolerance, right_reduction, wrong_reductions
from threestep.plugins.audit.references import masks, reductions
from threestep.plugins.audit.references.estimators import groups
from threestep.plugins.audit.references.kl import ESTIMATORS, pull
from threestep.plugins.audit.references.policies import LOSSES as POLICIES
from threestep.plugins.audit.references.policies import clipped as policy
from threestep.plugins.audit.references.policies.covariance import covariances
from threestep.plugins.audit.references.policies.tokens import Bounds, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable

_POLICY = ("policy",)

# --- from the rollout to the minibatch


def _targets(step: AuditedStep) -> np.ndarray:
    """bool [T], the drawn tokens."""
    return step.tensor("data_mask") if step.has("data_mask") else step.tensor("loss_mask")


def _handed(step: AuditedStep, source: str, turn: int = 0) -> np.ndarray:
    """Return [T], the rollout's numbers at the tokens of the minibatch. turn: of the response so many further on."""
    values_R, numbers_B = step.tensor(source), step.tensor("rollout_numbers")
    ends_B = np.cumsum(step.tensor("rollout_lengths"))
    place = {int(number): index for index, number in enumerate(numbers_B)}
    own_of_rank = [np.flatnonzero(step.rollout_rank_B == rank) for rank in range(step.ranks)]
    found_T = np.zeros(len(step.sequence_T))
    targets_T = _targets(step)
    bounds = np.cumsum([0, *step.tensor("lengths")])
    for sequence, number in enumerate(step.tensor("numbers").tolist()):
        if number not in place:
            raise LackingError(f"response {number} of the rollout")
        own = own_of_rank[int(step.rollout_rank_B[place[number]])]
        response = int(own[(place[number] - own[0] + turn) % len(own)])
        own_r = values_R[ends_B[response] - step.tensor("rollout_lengths")[response] : ends_B[response]]
        columns = np.flatnonzero(targets_T[bounds[sequence] : bounds[sequence + 1]]) + bounds[sequence]
        count = min(len(columns), len(own_r))
        found_T[columns[:count]] = own_r[:count]
    return found_T


def _rotated(step: AuditedStep, source: str, turn: int) -> np.ndarray:
    """Each response has the numbers of another in its micro-batch, its last one where those are fewer."""
    handed_T = _handed(step, source)
    targets_T, found_T = _targets(step), np.zeros(len(step.sequence_T))
    columns = [np.flatnonzero(targets_T & (step.sequence_T == sequence)) for sequence in range(len(step.rank_S))]
    for micro in np.unique(step.micro_S):
        own = np.flatnonzero(step.micro_S == micro)
        for place, sequence in enumerate(own):
            given = handed_T[columns[own[(place + turn) % len(own)]]]
            if len(given):
                taken = np.minimum(np.arange(len(columns[sequence])), len(given) - 1)
                found_T[columns[sequence]] = given[taken]
    return found_T


def _moved(step: AuditedStep, source: str, by: int) -> np.ndarray:
    return np.where(_targets(step), masks.shifted(_handed(step, source), by, step.sequence_T), 0.0)


def _handed_on(name: str, source: str, *more: Cause) -> Quantity:
    return Quantity(
        name,
        _POLICY,
        partial(_handed, source=source),
        (
            *more,
            Cause("each response has the next response's numbers", partial(_handed, source=source, turn=1)),
            Cause("each response has the previous response's numbers", partial(_handed, source=source, turn=-1)),
            Cause(
                "each response has the numbers of the next one in its micro-batch",
                partial(_rotated, source=source, turn=1),
            ),
            Cause(
                "each response has the numbers of the previous one in its micro-batch",
                partial(_rotated, source=source, turn=-1),
            ),
            Cause("the numbers are one token early", partial(_moved, source=source, by=-1)),
            Cause("the numbers are one token late", partial(_moved, source=source, by=1)),
        ),
        lambda step, right: 1e-6 * (1.0 + np.abs(right)),
        _targets,
        axis="T",
    )


def _whitened_again(step: AuditedStep) -> np.ndarray:
    return groups.whitened(_handed(step, "rollout_advantages"), step.tensor("loss_mask"))


def _sampling(step: AuditedStep) -> np.ndarray:
    return _handed(step, "rollout_sampling_logprobs")


def _current(step: AuditedStep) -> np.ndarray:
    return np.where(_targets(step), step.tensor("logprobs"), 0.0)


HANDED_ON = (
    _handed_on(
        "advantages",
        "rollout_advantages",
        Cause("advantages are whitened again over the minibatch", _whitened_again),
        Cause("the sign is wrong", lambda step: -_handed(step, "rollout_advantages")),
    ),
    _handed_on(
        "old_logprobs",
        "rollout_old_logprobs",
        Cause("the sampling log-probabilities are used in place of the training forward's", _sampling),
        Cause("the current policy's log-probabilities are used in place of the old ones", _current),
        Cause(
            "the reference's log-probabilities are used in place of the old ones",
            partial(_handed, source="rollout_ref_logprobs"),
        ),
    ),
    _handed_on("ref_logprobs", "rollout_ref_logprobs"),
    replace(_handed_on("corrections", "rollout_corrections"), applies=lambda step: step.corrects),
    replace(_handed_on("old_values", "rollout_values"), applies=lambda step: step.has_critic),
    replace(_handed_on("returns", "rollout_returns"), applies=lambda step: step.has_critic),
)

# --- the policy's loss


def _log_ratio(step: AuditedStep, old: str = "old_logprobs") -> np.ndarray:
    """Return [T]; 0 where the old policy is the current one: the update is on-policy."""
    if not step.has("old_logprobs"):
        return np.zeros(len(step.sequence_T))
    ratio_T = step.tensor("logprobs") - (_sampling(step) if old == "sampling" else step.tensor(old))
    return _levelled(step, np.where(step.tensor("loss_mask"), ratio_T, 0.0), str(step.settings.get("ratio", "token")))


def _levelled(step: AuditedStep, ratio_T: np.ndarray, level: str) -> np.ndarray:
    """Log-ratios of tokens, or at each token that of its sequence: the sum (RLOO), or the mean (GSPO)."""
    if level == "token":
        return ratio_T
    sums_S = step.sequence_sums(ratio_T)
    if level == "sequence mean":
        sums_S = sums_S / np.maximum(step.sequence_sums(step.tensor("loss_mask").astype(np.float64)), 1.0)
    return sums_S[step.sequence_T]


def _bounds(step: AuditedStep) -> tuple[float, float]:
    return float(step.setting("clip_low")), float(step.setting("clip_high"))


def _corrected(step: AuditedStep, loss_T: np.ndarray) -> np.ndarray:
    return loss_T * step.tensor("corrections") if step.has("corrections") else loss_T


def _all_bounds(step: AuditedStep) -> Bounds:
    settings = step.settings
    dual = settings.get("dual_clip")
    taus = tuple(float(settings.get(f"sapo_tau_{side}", usual)) for side, usual in (("pos", 1.0), ("neg", 1.05)))
    low, high = (0.0, 0.0) if _loss_name(step) in ("gpg", "sapo", "kl_cov") else _bounds(step)
    penalty = float(settings.get("kl_cov_coef", 0.0))
    return Bounds(low, high, None if dual is None else float(dual), penalty, taus)  # type: ignore[arg-type]


def _loss_name(step: AuditedStep) -> str:
    return str(step.settings.get("policy_loss", "ppo"))


def _selected(step: AuditedStep) -> np.ndarray:
    """Return bool [T], the tokens that KL-Cov and Clip-Cov treat apart."""
    if step.has("selected"):
        return step.tensor("selected")
    if _loss_name(step) != "kl_cov":
        raise LackingError("the tensor selected")
    counted_T = step.tensor("loss_mask")
    keys_T = covariances(step.tensor("advantages"), step.tensor("old_logprobs"), counted_T)
    count = max(1, int(float(step.setting("cov_share")) * counted_T.sum()))
    bound = np.sort(keys_T[counted_T])[-min(count, int(counted_T.sum()))] if counted_T.any() else np.inf
    return counted_T & (keys_T >= bound)


def tokens_of(step: AuditedStep, **changes: Any) -> Tokens:
    """The minibatch as a loss reads it. changes: of a `Tokens`."""
    counted_T, new_T = step.tensor("loss_mask"), step.tensor("logprobs")
    old_T = step.tensor("old_logprobs") if step.has("old_logprobs") else new_T
    if step.settings.get("ratio", "token") != "token":
        old_T = new_T - _log_ratio(step)
    selected_T = _selected(step) if _loss_name(step) in ("kl_cov", "clip_cov") else None
    found = Tokens(new_T, new_T, old_T, step.tensor("advantages"), counted_T, step.sequence_T, selected_T)
    return replace(found, **changes)


def _policy(
    step: AuditedStep, log_ratio_T: np.ndarray | None = None, sign: float = 1.0, name: str | None = None
) -> np.ndarray:
    """Return [T], the policy's loss. log_ratio_T: in place of log p - log p_old. name: of another loss."""
    own = tokens_of(step)
    if log_ratio_T is not None:
        own = replace(own, old_T=own.new_T - log_ratio_T)
    own = replace(own, advantage_T=sign * own.advantage_T)
    loss = _loss_name(step) if name is None else name
    if loss in ("kl_cov", "clip_cov") and own.selected_T is None:
        raise LackingError("the tensor selected")
    return _corrected(step, POLICIES[loss](own, _all_bounds(step)))


def _another_policy(name: str) -> Callable[[AuditedStep], np.ndarray]:
    def compute(step: AuditedStep) -> np.ndarray:
        if name == _loss_name(step):
            raise LackingError("another loss")
        return _policy(step, name=name)

    return compute


def _other_taus(step: AuditedStep) -> np.ndarray:
    if _loss_name(step) != "sapo":
        raise LackingError("SAPO")
    own = _all_bounds(step)
    return _corrected(step, POLICIES["sapo"](tokens_of(step), replace(own, taus=own.taus[::-1])))


def _nothing_selected(step: AuditedStep, every: bool) -> np.ndarray:
    selected_T = np.full(len(step.sequence_T), every)
    if _loss_name(step) not in ("kl_cov", "clip_cov"):
        raise LackingError("a loss with selected tokens")
    return _corrected(step, POLICIES[_loss_name(step)](tokens_of(step, selected_T=selected_T), _all_bounds(step)))


def _surrogates(step: AuditedStep) -> tuple[np.ndarray, np.ndarray]:
    """Free and held."""
    return policy.surrogates(np.exp(_log_ratio(step)), step.tensor("advantages"), *_bounds(step))


def _other_bounds(step: AuditedStep, low: float, high: float) -> np.ndarray:
    own = replace(_all_bounds(step), low=low, high=high, dual=None)
    return _corrected(step, POLICIES[_loss_name(step)](tokens_of(step), own))


def _of_level(step: AuditedStep, level: str) -> np.ndarray:
    """Return [T], the surrogate with the ratio of another level."""
    if not step.has("old_logprobs"):
        return _policy(step)
    ratio_T = np.where(step.tensor("loss_mask"), step.tensor("logprobs") - step.tensor("old_logprobs"), 0.0)
    return _policy(step, _levelled(step, ratio_T, level), name="ppo")


_POLICY_MISTAKES: tuple[tuple[str, Callable[[AuditedStep], np.ndarray]], ...] = (
    (
        "the clip takes the wrong side: the larger of the surrogates, not the smaller",
        lambda step: _corrected(step, np.minimum(*_surrogates(step))),
    ),
    ("the ratio is not clipped", lambda step: _other_bounds(step, 1.0, np.inf)),
    ("the ratio is clipped on both sides, whatever the advantage", lambda step: _corrected(step, _surrogates(step)[1])),
    ("the bounds of the clip are swapped", lambda step: _other_bounds(step, *reversed(_bounds(step)))),
    ("both bounds of the clip are the lower one", lambda step: _other_bounds(step, _bounds(step)[0], _bounds(step)[0])),
    ("the dual clip is left out", lambda step: _other_bounds(step, *_bounds(step))),
    ("the ratio is upside down", lambda step: _policy(step, -_log_ratio(step))),
    ("the ratio is per sequence (GSPO)", partial(_of_level, level="sequence mean")),
    ("the ratio is per sequence, as a sum", partial(_of_level, level="sequence sum")),
    ("the ratio is per token, not per sequence", partial(_of_level, level="token")),
    ("the ratio is taken to the sampling log-probabilities", lambda step: _policy(step, _log_ratio(step, "sampling"))),
    ("the ratio is taken to the reference", lambda step: _policy(step, _log_ratio(step, "ref_logprobs"))),
    ("the ratio is 1: the old policy is the current one", lambda step: _policy(step, np.zeros(len(step.sequence_T)))),
    ("the sign of the loss is wrong: it is maximized", lambda step: -_policy(step)),
    ("the sign of the advantages is wrong", lambda step: _policy(step, sign=-1.0)),
    ("the log-ratio is not exponentiated", lambda step: -_log_ratio(step) * step.tensor("advantages")),
    (
        "the log-probability in place of the ratio",
        lambda step: -step.tensor("logprobs") * step.tensor("advantages"),
    ),
    ("the correction of the mismatch is left out", lambda step: _policy(step) / _corrections(step)),
    ("the correction of the mismatch is applied twice", lambda step: _policy(step) * _corrections(step)),
    *((f"the loss is {name}", _another_policy(name)) for name in POLICIES if name not in ("kl_cov", "clip_cov")),
    ("SAPO's two temperatures are swapped", _other_taus),
    ("no token is selected", partial(_nothing_selected, every=False)),
    ("every token is selected", partial(_nothing_selected, every=True)),
    ("advantages are whitened again over the minibatch", lambda step: _with_advantages(step, _whitened_again(step))),
    ("the size of the advantages is left out", lambda step: _with_advantages(step, np.sign(step.tensor("advantages")))),
    ("the KL loss is included too", lambda step: _policy(step) + float(step.setting("kl_coef")) * _kl_losses(step)),
)


def _with_advantages(step: AuditedStep, advantage_T: np.ndarray) -> np.ndarray:
    return _corrected(step, POLICIES[_loss_name(step)](tokens_of(step, advantage_T=advantage_T), _all_bounds(step)))


def _corrections(step: AuditedStep) -> np.ndarray:
    weights_T = step.tensor("corrections")
    return np.where(weights_T == 0, 1.0, weights_T)


def _kl_losses(step: AuditedStep, name: str | None = None, weighted: bool | None = None) -> np.ndarray:
    """weighted: by the ratio, as the gradient of a KL under the old policy's samples wants it (DeepSeek-V3.2, 2025,
    section 3.1); default: as the settings say."""
    values_T = estimated_kl(step, step.tensor("logprobs"), step.tensor("ref_logprobs"), name)
    weighs = bool(step.settings.get("kl_weighted", False)) if weighted is None else weighted
    return values_T * np.exp(np.clip(_log_ratio(step), -60.0, 60.0)) if weighs else values_T


def _reversed_kl(step: AuditedStep) -> np.ndarray:
    return estimated_kl(step, step.tensor("ref_logprobs"), step.tensor("logprobs"))


def _old_kl(step: AuditedStep) -> np.ndarray:
    return estimated_kl(step, step.tensor("old_logprobs"), step.tensor("ref_logprobs"))


def _unbounded_kl(step: AuditedStep) -> np.ndarray:
    return ESTIMATORS[str(step.setting("kl_estimator"))](step.tensor("logprobs"), step.tensor("ref_logprobs"))


_KL_MISTAKES: tuple[tuple[str, Callable[[AuditedStep], np.ndarray]], ...] = (
    *((f"the KL's estimator is {name}", partial(_kl_losses, name=name)) for name in ESTIMATORS),
    ("the KL is not weighted by the ratio", partial(_kl_losses, weighted=False)),
    ("the KL is weighted by the ratio, though it should not be", partial(_kl_losses, weighted=True)),
    ("the KL runs from the reference to the policy", _reversed_kl),
    ("the KL is computed for the old policy, which has no gradient", _old_kl),
    ("the KL is not bounded", _unbounded_kl),
    ("the sign is wrong: the KL is maximized", lambda step: -_kl_losses(step)),
    ("the KL already includes its coefficient", lambda step: float(step.setting("kl_coef")) * _kl_losses(step)),
)


def value_losses(step: AuditedStep, clip: float | None = None, **others: np.ndarray) -> np.ndarray:
    own = float(step.setting("clip_value")) if clip is None else clip
    returns_T = others.get("returns_T", step.tensor("returns"))
    return policy.value_loss(step.tensor("new_values"), step.tensor("old_values"), returns_T, own)


def _smaller_values(step: AuditedStep) -> np.ndarray:
    new_T, old_T, returns_T = (step.tensor(name) for name in ("new_values", "old_values", "returns"))
    clip = float(step.setting("clip_value"))
    held_T = np.clip(new_T, old_T - clip, old_T + clip)
    return 0.5 * np.minimum((new_T - returns_T) ** 2, (held_T - returns_T) ** 2)


_VALUE_MISTAKES: tuple[tuple[str, Callable[[AuditedStep], np.ndarray]], ...] = (
    ("the factor 1/2 is left out", lambda step: 2.0 * value_losses(step)),
    ("the factor 1/2 is applied twice", lambda step: 0.5 * value_losses(step)),
    ("the value is not clipped", lambda step: value_losses(step, np.inf)),
    ("the clip takes the smaller of the errors", _smaller_values),
    ("the critic learns the advantages", lambda step: value_losses(step, returns_T=step.tensor("advantages"))),
    ("the critic learns its old values", lambda step: value_losses(step, returns_T=step.tensor("old_values"))),
)


def _loss(
    name: str,
    right: Callable[[AuditedStep], np.ndarray],
    mistakes: tuple[tuple[str, Callable[[AuditedStep], np.ndarray]], ...],
    reduction: Callable[[AuditedStep], reductions.Reduction],
) -> Quantity:
    """A loss of tokens and its reduction, either of which may be wrong."""

    def units(step: AuditedStep) -> reductions.Units:
        return step.token_units(right(step))

    def cause(sentence: str, compute: Callable[[AuditedStep], np.ndarray]) -> Cause:
        return Cause(sentence, lambda step: reduction(step)(step.token_units(compute(step))))

    def tolerance(step: AuditedStep, value: float) -> float:
        own = units(step)
        return of_loss(step, reduction(step)(own.with_values(np.abs(own.values_U) + 0.2)))

    return Quantity(
        name,
        _POLICY,
        lambda step: reduction(step)(units(step)),
        (*(cause(*mistake) for mistake in mistakes), *wrong_reductions(units, reduction)),
        tolerance,
    )


def _token_mean(step: AuditedStep) -> reductions.Reduction:
    return reductions.token_mean


def _part(step: AuditedStep, name: str) -> float:
    """The recorded part of the loss; one that is missing is computed."""
    if name in step.head.figures:
        return step.figure(name)
    losses_T = _policy(step) if name == "policy_loss" else _kl_losses(step)
    return right_reduction(step)(step.token_units(losses_T))


def _total(step: AuditedStep, times: float = 1.0) -> float:
    total = _part(step, "policy_loss")
    if step.setting("kl_in") == "loss":
        total += times * float(step.setting("kl_coef")) * _part(step, "kl_loss")
    return total


def _kl_once_more(step: AuditedStep) -> float:
    return _part(step, "policy_loss") + float(step.setting("kl_coef")) * _part(step, "kl_loss")


def _both(step: AuditedStep) -> reductions.Units:
    """Policy and KL, token by token."""
    if "policy_loss" in step.head.figures:
        raise LackingError("a loss of one piece: its parts are judged")
    has_kl = step.setting("kl_in") == "loss"
    return step.token_units(_policy(step) + (float(step.setting("kl_coef")) * _kl_losses(step) if has_kl else 0.0))


def _over_rollout(step: AuditedStep) -> float:
    units = _both(step)
    return float((units.weights_U * units.values_U).sum() / step.tensor("rollout_lengths").sum())


def _whole(compute: Callable[[AuditedStep], np.ndarray], of_kl: bool) -> Callable[[AuditedStep], float]:
    """The loss with a mistake in one of its parts, where parts are not recorded."""

    def computed(step: AuditedStep) -> float:
        right = _both(step)
        coefficient = float(step.settings.get("kl_coef", 0.0))
        part_T = coefficient * (compute(step) - _kl_losses(step)) if of_kl else compute(step) - _policy(step)
        return right_reduction(step)(right.with_values(right.values_U + part_T))

    return computed


def _total_rounding(step: AuditedStep, right: float) -> float:
    if "policy_loss" in step.head.figures:
        return of_loss(step, abs(step.figure("policy_loss")) + abs(right))
    return loss_tolerance(_both, step, right) + 0.2 * of_loss(step, 1.0)


def _has_kl_loss(step: AuditedStep) -> bool:
    return step.settings.get("kl_in") != "reward" or "kl_loss" in step.head.figures


LOSSES = (
    _loss("policy_loss", _policy, _POLICY_MISTAKES, right_reduction),
    replace(_loss("kl_loss", _kl_losses, _KL_MISTAKES, right_reduction), applies=_has_kl_loss),
    replace(_loss("value_loss", value_losses, _VALUE_MISTAKES, _token_mean), applies=lambda step: step.has_critic),
    Quantity(
        "loss",
        _POLICY,
        _total,
        (
            Cause("the KL is in the reward and in the loss", _kl_once_more),
            Cause("the KL is left out of the loss", partial(_total, times=0.0)),
            Cause("the KL is subtracted: it is maximized", partial(_total, times=-1.0)),
            Cause(
                "the KL has no coefficient",
                lambda step: _part(step, "policy_loss") + _part(step, "kl_loss"),
            ),
            Cause("the count covers the whole rollout, not just this step's part", _over_rollout),
            *wrong_reductions(_both, right_reduction),
            *(Cause(sentence, _whole(compute, of_kl=False)) for sentence, compute in _POLICY_MISTAKES),
            *(Cause(f"of the KL: {sentence}", _whole(compute, of_kl=True)) for sentence, compute in _KL_MISTAKES),
        ),
        _total_rounding,
        applies=lambda step: "loss" in step.head.figures or "policy_loss" not in step.head.figures,  # else its parts
    ),
)


# --- for the gradient: the loss of each token with and without a gradient


def policy_value(step: AuditedStep, new_T: np.ndarray) -> np.ndarray:
    """Return [T], policy and KL, of log-probabilities `new_T`; what has no gradient stays as recorded."""
    own = tokens_of(step, new_T=new_T)
    loss_T = _corrected(step, POLICIES[_loss_name(step)](own, _all_bounds(step)))
    if step.setting("kl_in") != "loss":
        return loss_T
    name = f"{step.setting('kl_estimator')}{step.settings.get('kl_gradient', '')}"
    ref_T = step.tensor("ref_logprobs")
    kl_T = pull(name, new_T - ref_T, own.held_T - ref_T)
    bound = step.settings.get("kl_bound")
    if bound is not None and name == "k3":
        kl_T = np.minimum(kl_T, float(bound))
    return loss_T + float(step.setting("kl_coef")) * kl_T
