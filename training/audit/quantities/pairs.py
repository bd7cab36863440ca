"""Losses of pairs of responses: DPO and its relatives, and the reward model. P pairs, S sequences, T tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from training.audit.quantities.quantity import Cause, Quantity, of_loss
from training.audit.quantities.step import AuditedStep, LackingError
from training.audit.quantities.tokens import loss_tolerance, wrong_reductions
from training.audit.references import masks, preference, reductions

_DPO, _REWARD = ("dpo",), ("reward",)
_SMALL = 2e-5  # of log-probabilities that are summed in float32


def _sums(step: AuditedStep) -> np.ndarray:
    return step.sequence_sums(np.where(step.tensor("loss_mask"), step.tensor("logprobs"), 0.0))


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
        Cause("the sign is wrong", lambda step: -_sums(step)),
    ),
    lambda step, right: _SMALL * (1.0 + np.abs(right)),
    axis="S",
)


def _ratios(step: AuditedStep, own: float = 1.0, reference: float = 1.0, mean: bool | None = None) -> np.ndarray:
    """Return [S], log pi / pi_ref. mean: over tokens; default: as the loss wants it."""
    ratios_S = own * step.tensor("logprob_sums")
    if reference:
        ratios_S = ratios_S - reference * step.tensor("ref_logprob_sums")
    takes_mean = step.setting("preference_loss") == "ipo" if mean is None else mean
    return ratios_S / _tokens(step) if takes_mean else ratios_S


def _of_margins(step: AuditedStep, ratios_S: np.ndarray, **changes: float | str) -> np.ndarray:
    loss = preference.LOSSES[str(changes.get("loss", step.setting("preference_loss")))]
    beta = float(changes.get("beta", step.setting("beta")))
    smoothing = float(changes.get("smoothing", step.settings.get("label_smoothing", 0.0)))
    return loss(ratios_S[step.tensor("chosen")] - ratios_S[step.tensor("rejected")], beta, smoothing)


def _pair_losses(step: AuditedStep) -> np.ndarray:
    return _of_margins(step, _ratios(step))


def _other_smoothing(step: AuditedStep) -> np.ndarray:
    return _of_margins(step, _ratios(step), smoothing=0.0)


def _changed(**changes: float | str) -> Callable[[AuditedStep], np.ndarray]:
    return lambda step: _of_margins(step, _ratios(step), **changes)


_DPO_MISTAKES: tuple[tuple[str, Callable[[AuditedStep], np.ndarray]], ...] = (
    ("chosen and rejected are swapped", lambda step: _of_margins(step, -_ratios(step))),
    ("the reference is left out", lambda step: _of_margins(step, _ratios(step, reference=0.0))),
    ("the reference is added, not subtracted", lambda step: _of_margins(step, _ratios(step, reference=-1.0))),
    ("policy and reference are swapped", lambda step: _of_margins(step, _ratios(step, -1.0, -1.0))),
    ("beta is left out", _changed(beta=1.0)),
    ("log-ratios are means over tokens", lambda step: _of_margins(step, _ratios(step, mean=True))),
    ("log-ratios are sums over tokens", lambda step: _of_margins(step, _ratios(step, mean=False))),
    ("label smoothing is left out", _other_smoothing),
    ("the loss is DPO's sigmoid", _changed(loss="sigmoid")),
    ("the loss is IPO's", _changed(loss="ipo")),
    ("the loss is the hinge", _changed(loss="hinge")),
    (
        "the rejected response's log-ratio is left out",
        lambda step: _of_margins(step, np.where(_is_chosen(step), _ratios(step), 0.0)),
    ),
)


def _is_chosen(step: AuditedStep) -> np.ndarray:
    found = np.zeros(len(step.rank_S), dtype=bool)
    found[step.tensor("chosen")] = True
    return found


_DPO_PAIRS = Quantity(
    "pair_losses",
    _DPO,
    _pair_losses,
    tuple(Cause(sentence, compute) for sentence, compute in _DPO_MISTAKES),
    lambda step, right: _pair_rounding(step) * np.ones(np.shape(right)),
    axis="P",
)


def _pair_rounding(step: AuditedStep) -> float:
    """The rounding of a margin of log-probabilities of this size."""
    if not step.has("logprob_sums"):
        return 1e-5
    sizes = np.abs(step.tensor("logprob_sums"))
    steepness = 1.0 if step.settings.get("preference_loss") != "ipo" else 1.0 + 1.0 / float(step.setting("beta"))
    return 1e-5 + 1e-6 * steepness * float(sizes.max(initial=1.0))


def _dpo_units(step: AuditedStep) -> reductions.Units:
    return step.pair_units(_pair_losses(step))


def _dpo_tolerance(step: AuditedStep, right: float) -> float:
    return loss_tolerance(_dpo_units, step, right) + _pair_rounding(step)


def _mean(step: AuditedStep) -> reductions.Reduction:
    return reductions.token_mean


def _in_the_loss(mistakes: Iterable[tuple[str, Callable[[AuditedStep], np.ndarray]]]) -> Iterator[Cause]:
    """Yield the mistakes of pairs as causes of a wrong loss of the step."""
    for sentence, compute in mistakes:
        yield Cause(sentence, lambda step, compute=compute: reductions.token_mean(step.pair_units(compute(step))))  # type: ignore[misc]


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


# --- the reward model


def _scored(step: AuditedStep, sign: float = 1.0, margin: float | None = None, **changes: float) -> np.ndarray:
    """Return [P]. sign: -1 swaps the pair. margin: the scale of the data's margins."""
    scale = _scale(step) if margin is None else margin
    scores_S = sign * step.tensor("scores")
    if scale and not step.has("margins"):
        raise LackingError("the tensor margins")
    margin_P = scale * step.tensor("margins") if scale else np.zeros(len(step.tensor("chosen")))
    return preference.ranking_loss(
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
    return np.exp(preference.log_sigmoid(gap_P))


_REWARD_MISTAKES: tuple[tuple[str, Callable[[AuditedStep], np.ndarray]], ...] = (
    ("chosen and rejected are swapped", lambda step: _scored(step, -1.0)),
    ("the data's margin is left out", lambda step: _scored(step, margin=0.0)),
    ("the data's margin is subtracted, though it should not be", lambda step: _scored(step, margin=1.0)),
    ("the data's margin is added, not subtracted", lambda step: _scored(step, margin=-_scale(step))),
    ("label smoothing is left out", lambda step: _scored(step, smoothing=0.0)),
    ("centring is left out", lambda step: _scored(step, centring=0.0)),
    ("scores are added, not subtracted", _score_sums),
)
_REWARD_PAIRS = Quantity(
    "pair_losses",
    _REWARD,
    _scored,
    tuple(Cause(sentence, compute) for sentence, compute in _REWARD_MISTAKES),
    axis="P",
)


def _reward_units(step: AuditedStep) -> reductions.Units:
    return step.pair_units(_scored(step))


_REWARD_LOSS = Quantity(
    "loss",
    _REWARD,
    lambda step: reductions.token_mean(_reward_units(step)),
    (
        *wrong_reductions(_reward_units, _mean),
        *_in_the_loss(_REWARD_MISTAKES),
    ),
    lambda step, right: of_loss(step, 1.0 + abs(right)),
)
QUANTITIES = (_LOGPROB_SUMS, _DPO_PAIRS, _DPO_LOSS, _REWARD_PAIRS, _REWARD_LOSS)
