"""The tokens that carry loss, their log-probabilities and losses, the count, and the loss: of SFT and, in part, of all.

T tokens, K micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.audit.quantities.models import JOINED, joined_logits
from threestep.plugins.audit.quantities.quantity import Cause, Quantity, exact, of_loss
from threestep.plugins.audit.quantities.step import LackingError
from threestep.plugins.audit.references import logprobs, masks, reductions

if TYPE_CHECKING:
    from collections.abc import Callable

    from threestep.plugins.audit.quantities.step import AuditedStep

_ALL = ("sft", "dpo", "policy")


def _mask(step: AuditedStep) -> np.ndarray:
    data_T = step.tensor("data_mask")
    right_T = masks.loss_mask(data_T, step.real_T, step.place_T == 0)
    if step.head.objective == "dpo" and {"longest_row", "cut"} <= step.settings.keys():
        right_T &= _kept(step, step.sequence_sums(step.real_T.astype(np.float64)))
    if step.head.objective != "policy" or not step.has("rollout_counts", "rollout_numbers", "numbers"):
        return right_T
    counts = dict(zip(step.tensor("rollout_numbers").tolist(), step.tensor("rollout_counts").tolist(), strict=True))
    counts_S = np.array([counts.get(number, True) for number in step.tensor("numbers").tolist()], dtype=bool)
    return right_T & counts_S[step.sequence_T]


def _kept(step: AuditedStep, lengths_S: np.ndarray) -> np.ndarray:
    """bool [T], the tokens that a cut of rows of these lengths leaves, but for a new first one."""
    longest = float(step.setting("longest_row"))
    if step.setting("cut") == "end":
        return np.asarray(step.place_T < longest)
    begin_T = np.maximum(lengths_S - longest, 0.0)[step.sequence_T]
    return np.asarray((step.place_T > begin_T) | (begin_T == 0))


def _cut_with_padding(step: AuditedStep) -> np.ndarray:
    right_T = masks.loss_mask(step.tensor("data_mask"), step.real_T, step.place_T == 0)
    return right_T & _kept(step, step.tensor("lengths").astype(np.float64))


def _longest_cut(step: AuditedStep) -> np.ndarray:
    """Without the last token of the longest rows of each micro-batch in which the recorded mask is wrong."""
    right_T, recorded_T = _mask(step), step.recorded("loss_mask")
    lengths_S = step.sequence_sums(step.real_T.astype(np.float64))
    micro_S = step.micro_S if step.has("micro_batches") else step.rank_S
    most_M = np.zeros(int(micro_S.max(initial=0)) + 1)
    np.maximum.at(most_M, micro_S, lengths_S)
    is_wrong_M = np.bincount(micro_S[step.sequence_T], right_T != recorded_T, minlength=len(most_M)) > 0
    is_cut_S = (lengths_S == most_M[micro_S]) & is_wrong_M[micro_S]
    return right_T & ~(is_cut_S[step.sequence_T] & (step.place_T == lengths_S[step.sequence_T] - 1))


def _moved(step: AuditedStep, by: int) -> np.ndarray:
    return masks.shifted(_mask(step), by, step.sequence_T)


def _inner(step: AuditedStep) -> np.ndarray:
    return step.place_T > 0


def _last_run(step: AuditedStep) -> np.ndarray:
    """The last response of each sequence alone."""
    right_T = _mask(step)
    begins_T = masks.run_begins(right_T, step.sequence_T)
    run_T = np.cumsum(begins_T)
    last_S = np.zeros(len(step.rank_S), dtype=np.int64)
    np.maximum.at(last_S, step.sequence_T[right_T], run_T[right_T])
    return right_T & (run_T == last_S[step.sequence_T])


MASKS = (
    Quantity(
        "loss_mask",
        _ALL,
        _mask,
        (
            Cause(
                "the end token is not trained: the last token of each response carries no loss",
                lambda step: _mask(step) & ~masks.run_ends(_mask(step), step.sequence_T),
            ),
            Cause(
                "the first token of each response carries no loss",
                lambda step: _mask(step) & ~masks.run_begins(_mask(step), step.sequence_T),
            ),
            Cause("the last token is cut off only in the longest rows of a micro-batch", _longest_cut),
            Cause("rows are cut after padding: short rows lose tokens and keep padding", _cut_with_padding),
            Cause("the mask is one token early", lambda step: _moved(step, -1)),
            Cause("the mask is one token late", lambda step: _moved(step, 1) & step.real_T),
            Cause("the mask is one token late, and reaches into padding", lambda step: _moved(step, 1)),
            Cause(
                "the token after each response carries loss too",
                lambda step: _mask(step) | _moved(step, 1),
            ),
            Cause("the prompt carries loss too", lambda step: step.real_T & _inner(step)),
            Cause("padding carries loss too", lambda step: _mask(step) | ~step.real_T),
            Cause("all tokens carry loss, prompts and padding too", _inner),
            Cause(
                "the first token of a sequence carries loss, too", lambda step: step.tensor("data_mask") & step.real_T
            ),
            Cause("only the last response of each conversation carries loss", _last_run),
            Cause(
                "responses that are left out carry loss",
                lambda step: step.tensor("data_mask") & step.real_T & _inner(step),
            ),
            Cause("prompts carry loss in place of responses", lambda step: step.real_T & _inner(step) & ~_mask(step)),
            Cause("no token carries loss", lambda step: np.zeros(len(step.real_T), dtype=bool)),
        ),
        exact,
        axis="T",
    ),
)


# --- log-probabilities and losses of tokens


def _logprobs(step: AuditedStep, temperature: float | None = None, change: Any = None) -> np.ndarray:
    logits_TV = step.tensor("logits")
    own = float(step.settings.get("temperature", 1.0)) if temperature is None else temperature
    return logprobs.logprobs(logits_TV if change is None else change(logits_TV), step.tensor("token_ids"), own)


def _neighbour(step: AuditedStep, by: int) -> np.ndarray:
    """Each token read from the logits `by` rows further on; NaN where these are of another sequence."""
    read_T = _logprobs(step, change=lambda logits_TV: np.roll(logits_TV, -by, axis=0))
    return np.where(np.roll(step.sequence_T, -by) == step.sequence_T, read_T, np.nan)


def _of_joined_rows(step: AuditedStep, restarts: bool) -> np.ndarray:
    """From the weights, where the logits are not recorded."""
    if step.has("logits"):
        raise LackingError("log-probabilities that follow from the weights")
    read_TV = joined_logits(step, restarts=restarts)
    return logprobs.logprobs(read_TV, step.tensor("token_ids"), float(step.settings.get("temperature", 1.0)))


def _of_bf16_softmax(step: AuditedStep) -> np.ndarray:
    """Kernels round between their sums too: a recorded number within one unit of this rounding, and so rounded itself,
    is taken for one of theirs."""
    right_T = logprobs.rounded_to_bfloat16(_logprobs(step, change=logprobs.rounded_to_bfloat16))
    recorded_T = step.recorded("logprobs")
    is_rounded_T = recorded_T == logprobs.rounded_to_bfloat16(recorded_T)
    return np.where(is_rounded_T & (np.abs(recorded_T - right_T) <= 2.0**-7 * np.abs(right_T)), recorded_T, right_T)


def _counted(step: AuditedStep) -> np.ndarray:
    return step.tensor("loss_mask") & _inner(step)


def _temperature(step: AuditedStep) -> float:
    return float(step.setting("temperature"))


def _logprob_rounding(step: AuditedStep, right: np.ndarray) -> np.ndarray:
    """A share of 1 + the size: of its own computation, where the logits are recorded, and of a whole forward where they
    follow from the weights; in bf16 that also rounds by the size of the logits."""
    sizes_T = 1.0 + np.abs(right)
    if step.has("logits") or str(step.settings.get("dtype", "fp32")) == "fp32":
        return 2e-5 * sizes_T
    largest_T = np.abs(step.tensor("logits")).max(axis=1) / float(step.settings.get("temperature", 1.0))
    return 5e-2 * (sizes_T + largest_T)


_LOGPROBS = Quantity(
    "logprobs",
    _ALL,
    _logprobs,
    (
        Cause("the temperature is left out", lambda step: _logprobs(step, 1.0)),
        Cause("the logits are multiplied by the temperature", lambda step: _logprobs(step, 1.0 / _temperature(step))),
        Cause("the logits are divided by the temperature twice", lambda step: _logprobs(step, _temperature(step) ** 2)),
        Cause("the temperature divides the log-probabilities", lambda step: _logprobs(step, 1.0) / _temperature(step)),
        Cause(
            "each token is read from the logits of its own place, not of the place before it", partial(_neighbour, by=1)
        ),
        Cause(
            "each token is read from the logits of the place before the one that predicts it",
            partial(_neighbour, by=-1),
        ),
        Cause(
            "the logits are rounded to bf16 first",
            lambda step: _logprobs(step, change=logprobs.rounded_to_bfloat16),
        ),
        Cause(
            "the log-probabilities are rounded to bf16",
            lambda step: logprobs.rounded_to_bfloat16(_logprobs(step)),
        ),
        Cause(
            "log-softmax is computed in bf16: the logits and the result are rounded",
            lambda step: _of_bf16_softmax(step),
        ),
        *(
            Cause(sentence, lambda step, own=own: _of_joined_rows(step, own))  # type: ignore[misc]
            for sentence, own in JOINED.items()
        ),
        Cause(
            "logits without their normalizer",
            lambda step: step.tensor("logits")[np.arange(len(step.place_T)), step.tensor("token_ids")],
        ),
    ),
    _logprob_rounding,
    _counted,
    axis="T",
)


def _nll(step: AuditedStep) -> np.ndarray:
    return np.where(step.tensor("loss_mask"), -step.tensor("logprobs"), 0.0)


_TOKEN_LOSSES = Quantity(
    "token_losses",
    ("sft",),
    _nll,
    (
        Cause("the sign is wrong", lambda step: -_nll(step)),
        Cause(
            "each loss is placed at the token that predicts",
            lambda step: masks.shifted(_nll(step), -1, step.sequence_T),
        ),
        Cause(
            "probabilities in place of log-probabilities",
            lambda step: np.where(_nll(step) > 0, -np.exp(-_nll(step)), 0.0),
        ),
    ),
    axis="T",
)

# --- the count and the loss


def right_reduction(step: AuditedStep) -> reductions.Reduction:
    """The reduction that the settings name."""
    return reductions.REDUCTIONS[str(step.setting("reduction"))]


def loss_tolerance(units: Callable[[AuditedStep], reductions.Units], step: AuditedStep, right: Any) -> float:
    """The rounding of the right reduction of these units."""
    own = units(step)
    reduce = reductions.token_mean if step.head.objective in ("dpo", "reward") else right_reduction(step)
    return of_loss(step, reduce(own.with_values(np.abs(own.values_U) + 0.05)))


def wrong_reductions(
    units: Callable[[AuditedStep], reductions.Units], right: Callable[[AuditedStep], reductions.Reduction]
) -> tuple[Cause, ...]:
    """The causes that reduce the right losses wrongly."""

    def cause(sentence: str, mistake: Callable[..., float]) -> Cause:
        return Cause(sentence, lambda step: mistake(units(step), right(step)))

    return tuple(cause(sentence, mistake) for sentence, mistake in reductions.MISTAKES.items())


def _sft_units(step: AuditedStep) -> reductions.Units:
    return step.token_units(_nll(step))


def _moved_units(step: AuditedStep, by: int) -> reductions.Units:
    """The recorded log-probabilities under a mask that is moved."""
    values_T = masks.shifted(_nll(step), -by, step.sequence_T)
    return step.token_units(values_T)


def _denominator(step: AuditedStep) -> float:
    if step.has("is_good"):
        return float(len(step.rank_S))
    if step.head.objective in ("dpo", "reward"):
        return float(step.pair_units(np.zeros(len(step.tensor("chosen")))).weights_U.sum())
    units = step.token_units(np.zeros(len(step.place_T)))
    if step.setting("reduction") == "token mean":
        return float(units.weights_U.sum())
    return reductions.counted_sequences(units)


def _local(step: AuditedStep, of_micro_batches: bool) -> float:
    """The count of the last micro-batch, or of the first rank."""
    units = step.token_units(np.zeros(len(step.place_T)))
    own = units.micro_U == units.micro_U.max() if of_micro_batches else units.rank_U == 0
    return float(units.weights_U[own].sum())


_DENOMINATOR = Quantity(
    "denominator",
    ("sft", "dpo", "reward", "policy"),
    _denominator,
    (
        Cause("the count of the last micro-batch alone", lambda step: _local(step, True)),
        Cause("the count of the first rank alone: denominators are local", lambda step: _local(step, False)),
        Cause(
            "the count has one extra token per sequence: the first, which nothing predicts",
            lambda step: _denominator(step) + reductions.counted_sequences(_sft_units(step)),
        ),
        Cause("the count includes prompts", lambda step: float(step.real_T.sum())),
        Cause(
            "the count includes the tokens of prompts except the first",
            lambda step: float((step.real_T & _inner(step)).sum()),
        ),
        Cause("the count includes prompts and padding", lambda step: float(len(step.place_T))),
        Cause("the count is of sequences, not of tokens", lambda step: float(len(step.rank_S))),
        Cause("the count is of tokens, not of sequences", lambda step: float(step.tensor("loss_mask").sum())),
        Cause("the count is of responses, not of pairs", lambda step: 2.0 * _denominator(step)),
        Cause("the count is of pairs, not of prompts", lambda step: float(len(step.tensor("chosen")))),
    ),
    lambda step, right: 1e-6 * right,
)
_LOSS = Quantity(
    "loss",
    ("sft",),
    lambda step: right_reduction(step)(_sft_units(step)),
    (
        *wrong_reductions(_sft_units, right_reduction),
        Cause("the sign is wrong", lambda step: -right_reduction(step)(_sft_units(step))),
        Cause("the losses are those of the next token", lambda step: right_reduction(step)(_moved_units(step, 1))),
        Cause(
            "the perplexity in place of the loss",
            lambda step: float(np.exp(min(50.0, right_reduction(step)(_sft_units(step))))),
        ),
        Cause("bits in place of nats", lambda step: right_reduction(step)(_sft_units(step)) / np.log(2.0)),
    ),
    partial(loss_tolerance, _sft_units),
)


def _micro_losses(step: AuditedStep, local: bool = False) -> np.ndarray:
    """The part that each micro-batch adds. local: its own mean, as a share of all micro-batches."""
    units = _sft_units(step)
    found = []
    for micro in range(step.micro_batches):
        inside = replace(units, weights_U=units.weights_U * (units.micro_U == micro))
        whole = reductions.plain_sum(units.with_values(np.ones(len(units.values_U))))
        part = reductions.plain_sum(inside) / whole
        found.append(reductions.token_mean(inside) / step.micro_batches if local else part)
    return np.array(found)


_MICRO_LOSSES = Quantity(
    "micro_losses",
    ("sft",),
    lambda step: _micro_losses(step) if step.setting("reduction") == "token mean" else _no_parts(),
    (
        Cause("each micro-batch adds its own mean", partial(_micro_losses, local=True)),
        Cause(
            "parts are not divided by the count of the whole step",
            lambda step: _micro_losses(step) * _denominator(step),
        ),
        Cause("divided by the number of ranks", lambda step: _micro_losses(step) / step.ranks),
        Cause("multiplied by the number of ranks", lambda step: _micro_losses(step) * step.ranks),
    ),
    lambda step, right: of_loss(step, 1.0) + 1e-5 * np.abs(right),
    axis="K",
)


def _no_parts() -> np.ndarray:
    raise LackingError("a rule for parts of a mean over sequences")


LOSSES = (_LOGPROBS, _TOKEN_LOSSES, _DENOMINATOR, _LOSS, _MICRO_LOSSES)
