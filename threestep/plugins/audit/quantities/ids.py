"""Checks of token ids and of the data's mask without the text: beginnings, ends, prompts of pairs; and of reference
and sampler, which no computation of the record gives.

A quantity here has 0 for each sequence in which nothing is wrong, and the number of what is in others. S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from threestep.plugins.audit.quantities.models import dropout_draws
from threestep.plugins.audit.quantities.quantity import Cause, Quantity, exact
from threestep.plugins.audit.quantities.step import LackingError

if TYPE_CHECKING:
    from threestep.plugins.audit.quantities.step import AuditedStep

_TWICE, _UNEQUAL, _ENDLESS, _SHORT, _ADDED = 1.0, 2.0, 3.0, 4.0, 5.0
_LEAST = 4  # sequences that show a habit of a template
_LEAST_SCATTERED, _DRAWS = 12, 24  # tokens, and forwards, that show a spread
_FAR = 0.1  # nats: the mean distance of sampler and training forward that no engine's rounding makes


def _sequences(step: AuditedStep) -> list[np.ndarray]:
    """Each sequence's real ids."""
    ids_T, real_T = step.tensor("token_ids"), step.real_T
    return [ids_T[(step.sequence_T == place) & real_T] for place in range(len(step.rank_S))]


def _masks(step: AuditedStep) -> list[np.ndarray]:
    mask_T, real_T = step.tensor("data_mask"), step.real_T
    return [mask_T[(step.sequence_T == place) & real_T] for place in range(len(step.rank_S))]


def _begins_twice(step: AuditedStep) -> np.ndarray:
    """bool [S]. Of a token that the record names, or of one that every sequence begins with twice."""
    firsts = [tuple(ids[:2].tolist()) for ids in _sequences(step)]
    begin = step.settings.get("begin_token_id")
    if begin is not None:
        return np.array([first == (int(begin),) * 2 for first in firsts])
    habit = len(firsts) >= _LEAST and len(set(firsts)) == 1 and len(set(firsts[0])) == 1 and len(firsts[0]) == 2
    return np.full(len(firsts), habit)


def _unequal_prompts(step: AuditedStep) -> np.ndarray:
    """bool [S], rejected responses whose prompt is not that of the chosen one."""
    found = np.zeros(len(step.rank_S), dtype=bool)
    if not step.has("chosen", "rejected", "data_mask"):
        return found
    prompts = [
        ids[: int(np.argmax(mask)) if mask.any() else len(ids)]
        for ids, mask in zip(_sequences(step), _masks(step), strict=True)
    ]
    for chosen, rejected in zip(step.tensor("chosen"), step.tensor("rejected"), strict=True):
        found[rejected] |= not np.array_equal(prompts[chosen], prompts[rejected])
    return found


def _endless(step: AuditedStep) -> np.ndarray:
    """bool [S]: no sequence of the step has the end token that the record names, though not all were cut."""
    nothing = np.zeros(len(step.rank_S), dtype=bool)
    if "end_token_id" not in step.settings:
        return nothing
    own = _sequences(step)
    lengths = [len(ids) for ids in own]
    are_cut = len(set(lengths)) == 1
    has_end = any(int(step.settings["end_token_id"]) in ids for ids in own)
    return ~nothing if own and not are_cut and not has_end else nothing


def _begins_with_the_template(step: AuditedStep) -> np.ndarray:
    """bool [S]: the sequence begins with the system prompt that the template writes where a conversation has none."""
    own = _sequences(step)
    added = [int(word) for word in str(step.settings.get("template_prompt", "")).split()]
    return np.array([bool(added) and ids[: len(added)].tolist() == added for ids in own], dtype=bool)


def _should_not_begin_so(step: AuditedStep) -> np.ndarray:
    """bool [S], if the user has said whose prompt is wanted: templates of released models write one on purpose."""
    is_wrong = step.settings.get("system_prompt") == "of the data"
    return _begins_with_the_template(step) & is_wrong


def notes_on_ids(step: AuditedStep) -> list[str]:
    """Sentences on what may be meant so, and then is right."""
    if not step.has("token_ids", "lengths") or "system_prompt" in step.settings:
        return []
    begins_S = _begins_with_the_template(step)
    if not begins_S.any():
        return []
    return [
        f"{int(begins_S.sum()):,} of {len(begins_S):,} sequences begin with a system prompt that the chat template "
        'adds; if none is wanted, use --as "system_prompt=of the data"'
    ]


def _ids(step: AuditedStep) -> np.ndarray:
    """Return [S], the number of what is wrong with each sequence."""
    step.tensor("token_ids")
    found = np.where(_unequal_prompts(step), _UNEQUAL, 0.0)
    found = np.where(_endless(step), _ENDLESS, found)
    found = np.where(_should_not_begin_so(step), _ADDED, found)
    return np.where(_begins_twice(step), _TWICE, found)


def _code(number: float, of: Callable[[AuditedStep], np.ndarray]) -> Callable[[AuditedStep], np.ndarray]:
    return lambda step: np.where(of(step), number, 0.0)


_TOKEN_IDS = Quantity(
    "token_ids",
    ("sft", "reward", "dpo", "policy"),
    lambda step: np.zeros(len(step.rank_S)),
    (
        Cause("the beginning token appears twice at the start of each sequence", _code(_TWICE, _begins_twice)),
        Cause(
            "chosen and rejected have different prompts: they are cut differently", _code(_UNEQUAL, _unequal_prompts)
        ),
        Cause(
            "no response ends with the end token: the template does not write it, so the model never learns to stop",
            _code(_ENDLESS, _endless),
        ),
        Cause(
            "the template adds a system prompt, which no row has",
            _code(_ADDED, _should_not_begin_so),
        ),
    ),
    exact,
    recorded=_ids,
    axis="S",
)


def _stops_early(step: AuditedStep) -> np.ndarray:
    """bool [S]: the data's mask ends one token before the sequence, and all sequences end with one token, though the
    mask's last tokens are of several kinds: it leaves out the end token, not a template's line break behind it."""
    ids, masks = _sequences(step), _masks(step)
    short = [len(own) > 1 and bool(mask[-2]) and not bool(mask[-1]) for own, mask in zip(ids, masks, strict=True)]
    nothing = np.zeros(len(ids), dtype=bool)
    if len(ids) < _LEAST or not all(short):
        return nothing
    lasts, befores = {int(own[-1]) for own in ids}, {int(own[-2]) for own in ids}
    return ~nothing if len(lasts) == 1 and len(befores) > 1 else nothing


_DATA_MASK = Quantity(
    "data_mask",
    ("sft", "dpo"),
    lambda step: np.zeros(len(step.rank_S)),
    (Cause("the end token is not trained: the data's mask stops before it", _code(_SHORT, _stops_early)),),
    exact,
    recorded=_code(_SHORT, _stops_early),
    axis="S",
)


# --- numbers of two models that must or must not be equal


def _has_moved(step: AuditedStep) -> bool:
    """True if the policy cannot be its reference any more: in float32, after two updates that change weights."""
    updates = float(step.settings.get("updates_before", step.head.step - 1.0))
    return updates >= 2.0 and str(step.settings.get("dtype", "fp32")) == "fp32" and bool(_rate(step))


def _rate(step: AuditedStep) -> float:
    return float(step.head.figures.get("learning_rate", 1.0))


def _apart(step: AuditedStep, name: str, policy: str) -> np.ndarray:
    """The reference's own numbers; NaN if they are the policy's, number for number, after updates."""
    own, of_policy = step.recorded(name), step.tensor(policy)
    if _has_moved(step) and len(own) >= _LEAST and np.array_equal(own, of_policy):
        return np.full(len(own), np.nan)
    return own


def _reference(name: str, policy: str, objective: str, axis: str) -> Quantity:
    return Quantity(
        name,
        (objective,),
        partial(_apart, name=name, policy=policy),
        (Cause("the reference is the trained policy: its numbers are the policy's, after updates", _tensor(policy)),),
        axis=axis,
    )


def _tensor(name: str) -> Callable[[AuditedStep], np.ndarray]:
    return lambda step: step.tensor(name)


def _sampler(step: AuditedStep) -> np.ndarray:
    """The sampler's log-probabilities, which the training forward's are near; where the mismatch is wanted, those."""
    if step.settings.get("mismatch_correction"):
        raise LackingError("a sampler without a mismatch: it is corrected")
    return step.tensor("rollout_sampling_logprobs")


def _sampler_rounding(step: AuditedStep, right: np.ndarray) -> np.ndarray:
    """Any distance that an engine's rounding makes, as long as the mean of all tokens is small."""
    apart_R = np.abs(step.tensor("rollout_old_logprobs") - right)
    is_near = len(apart_R) < _LEAST or float(apart_R.mean()) <= _FAR
    return np.full(len(right), np.inf) if is_near else 0.02 * (1.0 + np.abs(right))


def _old_by_model(step: AuditedStep, temperature: float | None) -> np.ndarray:
    """Log-probabilities that the recorded weights read on the minibatch, put back into the rollout; NaN for other
    responses. Right for the first update on a rollout alone, whose weights are those that rolled out."""
    from threestep.plugins.audit.references.logprobs import logprobs

    if not step.has_state("weights_before."):
        raise LackingError("the weights")
    own = float(step.settings.get("temperature", 1.0)) if temperature is None else temperature
    return _in_rollout(step, logprobs(step.tensor("logits"), step.tensor("token_ids"), own))


def _in_rollout(step: AuditedStep, read_T: np.ndarray) -> np.ndarray:
    """Return [R], the numbers of the minibatch's tokens at their places in the rollout; NaN for other responses."""
    targets_T = step.tensor("data_mask") if step.has("data_mask") else step.tensor("loss_mask")
    found_R, ends_B = np.full(len(step.response_R), np.nan), np.cumsum(step.tensor("rollout_lengths"))
    place = {int(number): index for index, number in enumerate(step.tensor("rollout_numbers"))}
    for sequence, number in enumerate(step.tensor("numbers").tolist()):
        own_T = np.flatnonzero(targets_T & (step.sequence_T == sequence))
        end = int(ends_B[place[number]])
        found_R[end - len(own_T) : end] = read_T[own_T]
    return found_R


def _scattered_by_dropout(step: AuditedStep) -> np.ndarray:
    """The recorded numbers, if they scatter about those of the model as it scatters under dropout of some rate: each by
    its own spread, to either side alike; else NaN. Right for the first update on a rollout."""
    right_R, recorded_R = _old_by_model(step, None), step.recorded("rollout_old_logprobs")
    nothing, known_R = np.full(len(right_R), np.nan), ~np.isnan(right_R)
    plain_R = _old_by_model(step, 1.0)
    if known_R.sum() < _LEAST_SCATTERED or np.allclose(recorded_R[known_R], plain_R[known_R], atol=1e-4):
        return nothing
    for place in ("outputs", "attention"):
        draws = [_in_rollout(step, drawn_T) - right_R for drawn_T in dropout_draws(step, place, _DRAWS)]
        spread_R = np.sqrt(np.mean(np.square(draws), axis=0))[known_R]
        apart = (recorded_R - right_R)[known_R] / np.maximum(spread_R, 1e-9)
        size = float(np.sqrt(np.mean(apart**2)))
        # A rate p spreads by the root of p / (1 - p): 0.01 to 0.7, beside the 0.1 of the draws.
        if 0.3 < size < 4.6 and abs(apart.mean()) < 0.6 * size and np.abs(apart).max() < 6.0 * size:
            return np.where(known_R, recorded_R, np.nan)
    return nothing


_OLD = Quantity(
    "rollout_old_logprobs",
    ("policy",),
    _sampler,
    (
        Cause("the temperature is left out of the log-probabilities", partial(_old_by_model, temperature=1.0)),
        Cause("the sign is wrong", lambda step: -step.tensor("rollout_sampling_logprobs")),
        Cause(
            "dropout was on when they were computed: they scatter around the model's own as with dropout",
            _scattered_by_dropout,
        ),
    ),
    _sampler_rounding,
    axis="R",
)
IDS = (_TOKEN_IDS, _DATA_MASK)
REFERENCES = (_reference("ref_logprob_sums", "logprob_sums", "dpo", "S"),)
SAMPLER = (_OLD, _reference("rollout_ref_logprobs", "rollout_old_logprobs", "policy", "R"))
