"""Losses of pairs of responses: DPO and its relatives, and the reward model. P pairs, S sequences, T tokens, U units of
a loss: pairs, or responses that are marked one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.audit.quantities.quantity import Cause, Quantity, of_loss
from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.audit.quantities.tokens import loss_tolerance, wrong_reductions
from threestep.plugins.audit.references import masks, reductions
from threestep.plugins.audit.references.preferences import (
    LOSSES,
    MARKED,
    ResponseSums,
    Term,
    lengths,
    marked,
    ranking,
    schedule,
)
from threestep.plugins.audit.references.preferences.responses import log_sigmoid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Change = Callable[[AuditedStep, ResponseSums], ResponseSums]

_DPO, _REWARD = ("dpo",), ("reward",)
_SMALL = 2e-5  # of log-probabilities that are summed in float32


def tail_weights(step: AuditedStep) -> np.ndarray:
    """Return [T], what a token weighs in its response's log-probability: LD-DPO's."""
    alpha, mask_T = float(step.settings.get("ld_alpha", 1.0)), step.tensor("loss_mask")
    if alpha == 1.0:
        return np.ones(len(mask_T))
    return lengths.tail_weights(mask_T, step.sequence_T, _prompts(step), _tokens(step), alpha=alpha)


def _prompts(step: AuditedStep) -> np.ndarray:
    """Return [S], equal for the responses to a prompt."""
    return step.tensor("rows") if step.has("rows") else np.arange(len(step.rank_S))


def _sums(step: AuditedStep) -> np.ndarray:
    return step.sequence_sums(tail_weights(step) * _masked(step))


def _plain_sums(step: AuditedStep) -> np.ndarray:
    return step.sequence_sums(_masked(step))


def _masked(step: AuditedStep) -> np.ndarray:
    return np.where(step.tensor("loss_mask"), step.tensor("logprobs"), 0.0)


def _all_sums(step: AuditedStep) -> np.ndarray:
    inside_T = step.real_T & (step.place_T > 0)  # nothing predicts a first token
    return step.sequence_sums(np.where(inside_T, step.tensor("logprobs"), 0.0))


def _without(step: AuditedStep, edge: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    mask_T = step.tensor("loss_mask")
    inside_T = mask_T & ~edge(mask_T, step.sequence_T)
    return step.sequence_sums(np.where(inside_T, step.tensor("logprobs"), 0.0))


def _tokens(step: AuditedStep) -> np.ndarray:
    return np.maximum(step.sequence_sums(step.tensor("loss_mask").astype(np.float64)), 1.0)


_LOGPROB_SUMS = Quantity(
    "logprob_sums",
    _DPO,
    _sums,
    (
        Cause("the prompt is counted in the log-probability of a response", _all_sums),
        Cause("the mean over a response's tokens, in place of the sum", lambda step: _sums(step) / _tokens(step)),
        Cause("the last token of a response is left out", partial(_without, edge=masks.run_ends)),
        Cause("the first token of a response is left out", partial(_without, edge=masks.run_begins)),
        Cause("tokens beyond the shortest response have the same weight as the others", _plain_sums),
        Cause("the sign is wrong", lambda step: -_sums(step)),
    ),
    lambda step, right: _SMALL * (1.0 + np.abs(right)),
    axis="S",
)


# --- the terms of the loss


def terms_of(step: AuditedStep) -> dict[str, float]:
    """The losses by name, with their weights."""
    if "preference_terms" not in step.settings:
        return {str(step.setting("preference_loss")): 1.0}
    found = {}
    for term in str(step.settings["preference_terms"]).split(","):
        name, _, weight = term.strip().partition(":")
        if name not in LOSSES:
            raise LackingError(f"a reference for the loss {name}")
        found[name] = float(weight or 1.0)
    return found


def constants_of(step: AuditedStep, **changes: Any) -> Term:
    """changes: of a Term."""
    settings = step.settings
    own = {
        "beta": float(step.setting("beta")),
        "smoothing": float(settings.get("label_smoothing", 0.0)),
        "gamma": float(settings.get("simpo_gamma", 0.5)),
        "alpha": float(settings.get("cpo_alpha", 1.0)),
        "point": changes["point"] if "point" in changes else _recorded_point(step),
        "weights": tuple(float(settings.get(f"{side}_weight", 1.0)) for side in ("desirable", "undesirable")),
    }
    return Term(**{**own, **changes})


def _recorded_point(step: AuditedStep) -> float | np.ndarray:
    """The point that marked responses are compared with: one number, or [S] where each micro-batch has its own."""
    if not any(name in MARKED for name in terms_of(step)):
        return 0.0
    if step.has("reference_points"):
        return step.tensor("reference_points")[step.micro_S]
    return step.figure("reference_point")


def responses_of(step: AuditedStep, **changes: np.ndarray) -> ResponseSums:
    """The responses of the step by recorded sums. changes: of a `ResponseSums`."""
    marks = step.tensor("is_good") if step.has("is_good") else None
    chosen_P = step.tensor("chosen") if marks is None else np.zeros(0, dtype=np.int64)
    rejected_P = step.tensor("rejected") if marks is None else chosen_P
    weighted_S = step.tensor("logprob_sums")
    has_mask = step.has("loss_mask") and step.has("logprobs")
    plain_S = _plain_sums(step) if has_mask and float(step.settings.get("ld_alpha", 1.0)) != 1.0 else weighted_S
    reads = any(name in REFERENCED for name in terms_of(step))
    reference_S = step.tensor("ref_logprob_sums") if reads else np.zeros(len(weighted_S))
    found = ResponseSums(plain_S, weighted_S, reference_S, _tokens(step), chosen_P, rejected_P, _shares(step), marks)
    return replace(found, **changes)


REFERENCED = (
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "ipo",
    "hinge",
    "apo_zero",
    "apo_down",
    "plackett_luce",
    "kto",
    "bco",
)


def _shares(step: AuditedStep) -> np.ndarray | None:
    """Return [P], so that the pairs of a chosen response, by their weights, have a number of it once."""
    if step.has("is_good"):
        return None
    chosen_P = step.tensor("chosen")
    weights_P = step.tensor("pair_weights") if step.has("pair_weights") else np.ones(len(chosen_P))
    return 1.0 / (weights_P * np.bincount(chosen_P, minlength=len(step.rank_S))[chosen_P])


def losses_of(
    step: AuditedStep, responses: ResponseSums, term: Term, terms: dict[str, float] | None = None
) -> np.ndarray:
    """Return [U], the weighted sum of the terms."""
    own = terms_of(step) if terms is None else terms
    if any(name in MARKED for name in own) != (responses.good_S is not None):
        raise LackingError("responses that the loss covers")
    return np.sum([weight * LOSSES[name](responses, term) for name, weight in own.items()], axis=0)


def _right(step: AuditedStep) -> np.ndarray:
    return losses_of(step, responses_of(step), constants_of(step))


def units_of(step: AuditedStep, values_U: np.ndarray) -> reductions.Units:
    """Losses of pairs, or of marked responses."""
    if not step.has("is_good"):
        return step.pair_units(values_U)
    return step.sequence_units(values_U)


def _with(**changes: Any) -> Callable[[AuditedStep], np.ndarray]:
    """With other constants."""
    return lambda step: losses_of(step, responses_of(step), constants_of(step, **changes))


def _of(change: Callable[[AuditedStep, ResponseSums], ResponseSums]) -> Callable[[AuditedStep], np.ndarray]:
    """With other responses."""
    return lambda step: losses_of(step, change(step, responses_of(step)), constants_of(step))


def _swapped(step: AuditedStep, own: ResponseSums) -> ResponseSums:
    return own.swapped() if own.good_S is None else replace(own, good_S=~own.good_S)


def _reference_times(own: ResponseSums, times: float) -> ResponseSums:
    return replace(own, reference_S=times * own.reference_S)


def _exchanged(step: AuditedStep, own: ResponseSums) -> ResponseSums:
    return replace(own, weighted_S=own.reference_S, sums_S=own.reference_S, reference_S=own.weighted_S)


def _means(step: AuditedStep, own: ResponseSums) -> ResponseSums:
    """Sums become means; of means nothing changes."""
    one_S = np.ones(len(own.tokens_S))
    changed = replace(own, weighted_S=own.weighted_S / own.tokens_S, reference_S=own.reference_S / own.tokens_S)
    return replace(changed, sums_S=own.sums_S / own.tokens_S, tokens_S=one_S)


def _as_sums(step: AuditedStep, own: ResponseSums) -> ResponseSums:
    return replace(own, tokens_S=np.ones(len(own.tokens_S)))


def _one_sided(step: AuditedStep, own: ResponseSums) -> ResponseSums:
    keep_S = np.zeros(len(own.sums_S), dtype=bool)
    keep_S[own.chosen_P] = True
    return replace(own, weighted_S=own.weighted_S * keep_S, reference_S=own.reference_S * keep_S)


def _without_tails(step: AuditedStep, own: ResponseSums) -> ResponseSums:
    return replace(own, weighted_S=own.sums_S)


def _lengths_with_prompts(step: AuditedStep, own: ResponseSums) -> ResponseSums:
    return replace(own, tokens_S=np.maximum(step.sequence_sums(step.real_T.astype(np.float64)), 1.0))


def _lengths_shifted(step: AuditedStep, own: ResponseSums) -> ResponseSums:
    return replace(own, tokens_S=np.maximum(own.tokens_S - 1.0, 1.0))


def _another(name: str) -> Callable[..., np.ndarray]:
    """Another loss in place of the one that is wanted."""

    def compute(
        step: AuditedStep, change: Callable[[AuditedStep, ResponseSums], ResponseSums] | None = None
    ) -> np.ndarray:
        own = terms_of(step)
        if name in own:
            raise LackingError("another loss")
        first, *others = own
        changed = {name: own[first], **{other: own[other] for other in others}}
        own_responses = responses_of(step) if change is None else change(step, responses_of(step))
        return losses_of(step, own_responses, constants_of(step), changed)

    return compute


def _other_weights(step: AuditedStep, change: Callable[[int, float], float]) -> np.ndarray:
    own = {name: change(place, weight) for place, (name, weight) in enumerate(terms_of(step).items())}
    return losses_of(step, responses_of(step), constants_of(step), own)


def _likelihood_of_step(step: AuditedStep) -> np.ndarray:
    """The likelihood is the mean over all chosen tokens of the step, in place of a mean over responses."""
    weight = sum(
        weight * (constants_of(step).alpha if name == "cpo" else 1.0)
        for name, weight in terms_of(step).items()
        if name in ("sft", "cpo", "orpo")
    )
    if not weight:
        raise LackingError("a likelihood")
    own = responses_of(step)
    best = np.unique(own.chosen_P[~np.isin(own.chosen_P, own.rejected_P)])
    token_mean = -own.sums_S[best].sum() / own.tokens_S[best].sum()
    of_responses = LOSSES["sft"](own, constants_of(step))
    return _right(step) + weight * (token_mean - of_responses)


def _likelihood_with_prompts(step: AuditedStep) -> np.ndarray:
    """The likelihood is over prompt and response, as TRL's ORPO has it."""
    if not {"sft", "cpo", "orpo"} & set(terms_of(step)):
        raise LackingError("a likelihood")
    inside_T = step.real_T & (step.place_T > 0)
    tokens_S = np.maximum(step.sequence_sums(inside_T.astype(np.float64)), 1.0)
    own, term = responses_of(step), constants_of(step)
    whole = replace(own, sums_S=_all_sums(step), tokens_S=tokens_S)
    apart = LOSSES["sft"](whole, term) - LOSSES["sft"](own, term)
    terms = terms_of(step)
    weights = {"sft": 1.0, "orpo": 1.0, "cpo": term.alpha}
    return _right(step) + sum(weights[name] * terms[name] for name in terms if name in weights) * apart


_DPO_MISTAKES: tuple[tuple[str, Callable[[AuditedStep], np.ndarray]], ...] = (
    ("chosen and rejected are swapped", _of(_swapped)),
    ("the reference is left out", _of(lambda step, own: _reference_times(own, 0.0))),
    ("the reference is added, not subtracted", _of(lambda step, own: _reference_times(own, -1.0))),
    ("policy and reference are swapped", _of(_exchanged)),
    ("beta is left out", _with(beta=1.0)),
    ("beta counts twice", lambda step: _with(beta=constants_of(step).beta ** 2)(step)),
    (
        "label smoothing is on the wrong side",
        lambda step: _with(smoothing=1.0 - constants_of(step).smoothing)(step),
    ),
    ("beta divides, where it should multiply", lambda step: _with(beta=1.0 / constants_of(step).beta)(step)),
    ("log-ratios are means over tokens", _of(_means)),
    ("log-ratios are sums over tokens", _of(_as_sums)),
    ("means count the tokens of the prompt too", _of(_lengths_with_prompts)),
    ("means count one token less", _of(_lengths_shifted)),
    ("label smoothing is left out", _with(smoothing=0.0)),
    ("the margin gamma is left out", _with(gamma=0.0)),
    ("the margin gamma is added, not subtracted", lambda step: _with(gamma=-constants_of(step).gamma)(step)),
    ("the likelihood is left out", _with(alpha=0.0)),
    ("the likelihood has no weight", _with(alpha=1.0)),
    ("the likelihood is a mean over all tokens of the step, not over each response", _likelihood_of_step),
    ("the likelihood is over prompt and response", _likelihood_with_prompts),
    ("the loss is DPO's sigmoid", _another("sigmoid")),
    ("the loss is IPO's", _another("ipo")),
    ("the loss is IPO's, on sums", partial(_another("ipo"), change=_as_sums)),
    ("the loss is the hinge", _another("hinge")),
    *(
        (f"the loss is {name}", _another(name))
        for name in ("sigmoid_norm", "robust", "apo_zero", "apo_down", "simpo", "cpo", "orpo", "kto", "bco")
    ),
    ("the weights of the terms are left out", lambda step: _other_weights(step, lambda place, weight: 1.0)),
    ("the first term alone", lambda step: _other_weights(step, lambda place, weight: weight * (place == 0))),
    ("the first term is left out", lambda step: _other_weights(step, lambda place, weight: weight * (place > 0))),
    ("the rejected response's log-ratio is left out", _of(_one_sided)),
    ("tokens beyond the shortest response have the same weight as the others", _of(_without_tails)),
    ("the reference point is left out", _with(point=0.0)),
    ("good and bad responses have equal weights", _with(weights=(1.0, 1.0))),
    (
        "the weights of good and bad responses are swapped",
        lambda step: _with(weights=constants_of(step).weights[::-1])(step),
    ),
)

_DPO_PAIRS = Quantity(
    "pair_losses",
    _DPO,
    _right,
    tuple(Cause(sentence, compute) for sentence, compute in _DPO_MISTAKES),
    lambda step, right: _pair_rounding(step) * np.ones(np.shape(right)),
    axis="P",
)


def _pair_rounding(step: AuditedStep) -> float:
    """The rounding of a margin of log-probabilities of this size."""
    if not step.has("logprob_sums"):
        return 1e-5
    sizes = np.abs(step.tensor("logprob_sums"))
    steepness = 1.0
    for name, weight in terms_of(step).items():
        beta = float(step.setting("beta"))
        steepness += weight * (1.0 / beta if name == "ipo" else beta)
    return 1e-5 + 1e-6 * steepness * float(sizes.max(initial=1.0))


def _dpo_units(step: AuditedStep) -> reductions.Units:
    return units_of(step, _right(step))


def _dpo_tolerance(step: AuditedStep, right: float) -> float:
    return loss_tolerance(_dpo_units, step, right) + _pair_rounding(step)


def _mean(step: AuditedStep) -> reductions.Reduction:
    return reductions.token_mean


def _in_the_loss(mistakes: Iterable[tuple[str, Callable[[AuditedStep], np.ndarray]]]) -> Iterator[Cause]:
    """Yield the mistakes of pairs as causes of a wrong loss of the step."""
    for sentence, compute in mistakes:
        yield Cause(sentence, lambda step, compute=compute: reductions.token_mean(units_of(step, compute(step))))  # type: ignore[misc]


_DPO_LOSS = Quantity(
    "loss",
    _DPO,
    lambda step: reductions.token_mean(_dpo_units(step)),
    (
        *wrong_reductions(_dpo_units, _mean),
        *_in_the_loss(_DPO_MISTAKES),
    ),
    _dpo_tolerance,
)

# --- what a step is given of the whole run: beta, and the point that marked responses are compared with


def _beta(step: AuditedStep, late: float = 0.0) -> float:
    first, last = float(step.setting("first_beta")), float(step.setting("final_beta"))
    cosine = step.settings.get("beta_schedule") == "cosine"
    return schedule.beta_at(step.head.step - late, float(step.setting("total_steps")), first, last, cosine=cosine)


_BETA = Quantity(
    "beta",
    _DPO,
    _beta,
    (
        Cause("beta is the previous step's", lambda step: _beta(step, 1.0)),
        Cause("beta is the next step's", lambda step: _beta(step, -1.0)),
        Cause("beta stays at its first value", lambda step: float(step.setting("first_beta"))),
        Cause("beta has its last value", lambda step: float(step.setting("final_beta"))),
    ),
    lambda step, right: 1e-6 * right,
    applies=lambda step: "first_beta" in step.settings or "beta_schedule" in step.settings,
)


def _point(step: AuditedStep, ranks: tuple[int, ...] | None = None) -> float:
    """ranks: that are looked at; default: all."""
    keep_S = np.ones(len(step.rank_S), dtype=bool) if ranks is None else np.isin(step.rank_S, ranks)
    names = [name for name in terms_of(step) if name in MARKED]
    if names == ["kto"]:
        return marked.kto_point(step.tensor("mismatched_ratios")[keep_S])
    if names != ["bco"]:
        raise LackingError("a loss with a reference point")
    return marked.bco_point(responses_of(step).ratios_S[keep_S], step.tensor("is_good")[keep_S])


def _mean_of_bounded(step: AuditedStep, group_S: np.ndarray) -> float:
    """The mean over groups of their bounded means."""
    ratios_S = step.tensor("mismatched_ratios")
    return float(np.mean([marked.kto_point(ratios_S[group_S == group]) for group in np.unique(group_S)]))


_POINT = Quantity(
    "reference_point",
    _DPO,
    _point,
    (
        Cause("the point is not bounded by 0", lambda step: float(step.tensor("mismatched_ratios").mean())),
        Cause("the bound of 0 is put on each micro-batch", lambda step: _mean_of_bounded(step, step.micro_S)),
        Cause("the bound of 0 is put on each rank", lambda step: _mean_of_bounded(step, step.rank_S)),
        Cause("the point comes from the first rank alone", partial(_point, ranks=(0,))),
        Cause(
            "the point comes from the rows' own responses, not from mismatched ones",
            lambda step: marked.kto_point(responses_of(step).ratios_S),
        ),
        Cause("the point is the plain mean of all responses", lambda step: float(responses_of(step).ratios_S.mean())),
        Cause("there is no point: it is 0", lambda step: 0.0),
    ),
    lambda step, right: 2e-5 * (1.0 + float(np.abs(step.tensor("logprob_sums")).max(initial=0.0))),
    applies=lambda step: "reference_point" in step.head.figures or (_is_marked(step) and not _has_points(step)),
)


def _points(step: AuditedStep, bounded: bool = True) -> np.ndarray:
    """Return [K], the mean over ranks of each micro-batch's mean."""
    if list(terms_of(step)) != ["kto"]:
        raise LackingError("a reference for this point for each micro-batch")
    return _of_each_micro_batch(step, step.tensor("mismatched_ratios"), bounded)


def _of_each_micro_batch(step: AuditedStep, values_S: np.ndarray, bounded: bool = True) -> np.ndarray:
    found_K = np.zeros(step.micro_batches)
    own_S = step.tensor("micro_batches")  # of a rank: the same number on all of them is one moment
    for place in np.unique(own_S):
        inside_S = own_S == place
        means = [values_S[inside_S & (step.rank_S == rank)].mean() for rank in np.unique(step.rank_S[inside_S])]
        mean = float(np.mean(means))
        found_K[np.unique(step.micro_S[inside_S])] = max(mean, 0.0) if bounded else mean
    return found_K


_POINTS = Quantity(
    "reference_points",
    _DPO,
    _points,
    (
        Cause("the points are not bounded by 0", partial(_points, bounded=False)),
        Cause(
            "each micro-batch has the point of the whole step",
            lambda step: np.full(step.micro_batches, marked.kto_point(step.tensor("mismatched_ratios"))),
        ),
        Cause(
            "the points come from the rows' own responses, not from mismatched ones",
            lambda step: _of_each_micro_batch(step, responses_of(step).ratios_S),
        ),
        Cause("there are no points: they are 0", lambda step: np.zeros(step.micro_batches)),
    ),
    lambda step, right: _POINT.tolerance(step, right),
    axis="K",
    applies=lambda step: _has_points(step),
)


def _has_points(step: AuditedStep) -> bool:
    return step.has("reference_points")


def _is_marked(step: AuditedStep) -> bool:
    """True if a loss of the step compares each response with a point."""
    told = str(step.settings.get("preference_terms") or step.settings.get("preference_loss", ""))
    return any(term.strip().partition(":")[0] in MARKED for term in told.split(","))


# --- the reward model


def _scored(step: AuditedStep, sign: float = 1.0, margin: float | None = None, **changes: float) -> np.ndarray:
    """Return [P]. sign: -1 swaps the pair. margin: the scale of the data's margins."""
    scale = _scale(step) if margin is None else margin
    scores_S = sign * step.tensor("scores")
    if scale and not step.has("margins"):
        raise LackingError("the tensor margins")
    margin_P = scale * step.tensor("margins") if scale else np.zeros(len(step.tensor("chosen")))
    return ranking.ranking_loss(
        scores_S[step.tensor("chosen")],
        scores_S[step.tensor("rejected")],
        margin_P,
        smoothing=float(changes.get("smoothing", step.settings.get("label_smoothing", 0.0))),
        centring=float(changes.get("centring", step.settings.get("center_coef", 0.0))),
    )


def _scale(step: AuditedStep) -> float:
    return float(step.settings.get("margin_scale", 0.0))


def _score_sums(step: AuditedStep) -> np.ndarray:
    scores_S = step.tensor("scores")
    return -np.log(preference_probability(scores_S[step.tensor("chosen")] + scores_S[step.tensor("rejected")]))


def preference_probability(gap_P: np.ndarray) -> np.ndarray:
    """Return sigmoid(gap)."""
    return np.exp(log_sigmoid(gap_P))


def _centred_apart(step: AuditedStep) -> np.ndarray:
    scores_S = step.tensor("scores")
    apart_P = scores_S[step.tensor("chosen")] - scores_S[step.tensor("rejected")]
    return _scored(step, centring=0.0) + float(step.setting("center_coef")) * apart_P**2


_REWARD_MISTAKES: tuple[tuple[str, Callable[[AuditedStep], np.ndarray]], ...] = (
    ("chosen and rejected are swapped", lambda step: _scored(step, -1.0)),
    ("the data's margin is left out", lambda step: _scored(step, margin=0.0)),
    ("the data's margin is subtracted, though it should not be", lambda step: _scored(step, margin=1.0)),
    ("the data's margin is added, not subtracted", lambda step: _scored(step, margin=-_scale(step))),
    ("label smoothing is left out", lambda step: _scored(step, smoothing=0.0)),
    ("centering is left out", lambda step: _scored(step, centring=0.0)),
    ("centering uses the difference, not the sum", lambda step: _centred_apart(step)),
    (
        "label smoothing is on the wrong side",
        lambda step: _scored(step, smoothing=1.0 - float(step.setting("label_smoothing"))),
    ),
    ("scores are added, not subtracted", _score_sums),
)
_REWARD_PAIRS = Quantity(
    "pair_losses",
    _REWARD,
    _scored,
    tuple(Cause(sentence, compute) for sentence, compute in _REWARD_MISTAKES),
    axis="P",
)


def reward_units(step: AuditedStep) -> reductions.Units:
    return step.pair_units(_scored(step))


_REWARD_LOSS = Quantity(
    "loss",
    _REWARD,
    lambda step: reductions.token_mean(reward_units(step)),
    (
        *wrong_reductions(reward_units, _mean),
        *_in_the_loss(_REWARD_MISTAKES),
    ),
    lambda step, right: of_loss(step, 1.0 + abs(right)),
)
QUANTITIES = (_LOGPROB_SUMS, _BETA, _POINT, _POINTS, _DPO_PAIRS, _DPO_LOSS, _REWARD_PAIRS, _REWARD_LOSS)
