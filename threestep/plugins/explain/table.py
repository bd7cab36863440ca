"""The numbers of an explained step, a column each: of tokens, and of sequences.

S sequences, T tokens without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.explain.shares import Shares, slopes_of
from threestep.plugins.explain.turns import turns_of
from training.utils.contracts.rollout import MODEL

if TYPE_CHECKING:
    from threestep.plugins.audit.quantities.step import AuditedStep
    from threestep.plugins.explain.updates import Update

# What is said of each column, for the page and the documentation; these stand in the table in this order.
COLUMNS = {
    "sequence": "the sequence, from 0, over all ranks",
    "place": "the token's place in its sequence",
    "token_id": "its id",
    "text": "its text",
    "role": "whether it carries loss, and why not",
    "speaker": "whose text it is: the prompt's, the model's, or that of an answer between two turns of the model",
    "turn": "the model's turn, from 1, with the answer that follows it; 0 in the prompt",
    "share": "its share of the change in the loss along the update, to first order; below 0: the loss falls",
    "share_gradient": "the part of it along this step's gradient, clipped and scaled by Adam",
    "share_earlier": "the part of it along the gradients of earlier steps",
    "share_decay": "the part of it along weight decay",
    "share_plain": "the share along the clipped gradient times the rate, as in plain gradient descent",
    "share_policy": "the part of it from the policy loss",
    "share_kl": "the part of it from the KL",
    "share_entropy": "the part of it from the entropy bonus",
    "probability": "of the token before the step",
    "probability_after": "after it",
    "entropy": "of the distribution that it was drawn from, nats, before the step",
    "ratio": "the probability divided by that of the policy that rolled out, before the step",
    "clipped": "its policy loss has no slope, though its advantage is not 0",
    "advantage": "as the loss received it",
    "correction": "weight that corrects a mismatch between rollout and training",
    "kl": "log-probability less the reference's, nats",
    "old_value": "the critic's at the rollout",
    "return": "what the critic learns",
    "reward": "of the token, with the KL if it is part of the reward",
}
SEQUENCE_COLUMNS = {
    "sequence": "from 0, over all ranks",
    "rank": "whose sequence it was",
    "name": "the row of the dataset, or the number of the response",
    "from": "the file and line of its row, or the dataset and the row in it",
    "tokens": "with its prompt",
    "trained": "tokens that carry loss",
    "share": "the sum of its tokens' shares",
    "turns": "of the model",
    "group": "equal for the responses to one prompt",
    "pair": "equal for the responses of a pair",
    "side": "chosen or rejected, or the mark of a response",
    "score": "of the response, or the reward model's",
    "counts": "False where the response is left out of the loss",
    "ended": "False where the length limit cut the response",
}
TRAINED, FIRST, PROMPT, LEFT_OUT, NO_LOSS = "trained", "first token", "prompt", "left out of the loss", "no loss"
RESPONSE_LEFT_OUT, RESPONSE, SCORED = "its response is left out", "response", "the score is read here"


@dataclass(frozen=True)
class Explained:
    """tokens, sequences: columns by name. figures: of the step. notes: what a reader must know of the numbers."""

    title: str
    tokens: Mapping[str, np.ndarray]
    sequences: Mapping[str, np.ndarray]
    figures: Mapping[str, float]
    notes: tuple[str, ...] = ()

    def to_pandas(self) -> Any:
        """Return the tokens as a frame, a row each."""
        import pandas

        return pandas.DataFrame(dict(self.tokens))


def explained(step: AuditedStep, shares: Shares, update: Update, texts: Mapping[int, str]) -> Explained:
    """Return a step's table. texts: of token ids; ids without one stand as <id>."""
    real_T = step.real_T
    ids_T = step.tensor("token_ids")[real_T]
    sequence_T = step.sequence_T[real_T]
    tokens: dict[str, np.ndarray] = {
        "sequence": sequence_T,
        "place": step.place_T[real_T],
        "token_id": ids_T,
        "text": np.array([texts.get(int(each), f"<{int(each)}>") for each in ids_T], dtype=object),
        "role": _roles(step)[real_T],
        **_turn_columns(step),
        **_share_columns(step, shares),
        **_model_columns(shares),
        **_policy_columns(step, shares),
    }
    figures = {
        "change": float(shares.whole.sum()),
        **{name: float(values.sum()) for name, values in shares.parts.items()},
        "clip": update.clip,
        **step.head.figures,
    }
    return Explained(_title(step), _ordered(tokens), _of_sequences(step, tokens), figures)


def _title(step: AuditedStep) -> str:
    ranks = f"{step.ranks} rank" + ("s" if step.ranks > 1 else "")
    return f"{step.settings.get('advantage') or step.head.objective}, step {step.head.step:,}, {ranks}"


def _ordered(tokens: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tokens[name] for name in COLUMNS if name in tokens}


def _share_columns(step: AuditedStep, shares: Shares) -> dict[str, np.ndarray]:
    """Shares by token; a sequence's stands at its last token."""

    def by_token(values: np.ndarray) -> np.ndarray:
        if not shares.is_of_sequences:
            return values
        found_T = np.zeros(int(step.real_T.sum()))
        found_T[_last_tokens(step)] = values
        return found_T

    found = {"share": by_token(shares.whole)}
    found |= {f"share_{name}": by_token(values) for name, values in shares.parts.items()}
    return found


def _last_tokens(step: AuditedStep) -> np.ndarray:
    """Return [S], the place of each sequence's last real token among all."""
    counts = np.bincount(step.sequence_T[step.real_T], minlength=len(step.rank_S))
    return np.cumsum(counts) - 1


def _model_columns(shares: Shares) -> dict[str, np.ndarray]:
    before, after = shares.before, shares.after
    if before.logprobs_T is None or after.logprobs_T is None or before.entropies_T is None:
        return {}
    return {
        "probability": np.exp(before.logprobs_T),
        "probability_after": np.exp(after.logprobs_T),
        "entropy": before.entropies_T,
    }


def _roles(step: AuditedStep) -> np.ndarray:
    """Return [T], words."""
    found_T = np.full(len(step.place_T), NO_LOSS, dtype=object)
    if step.has("data_mask"):
        data_T = step.tensor("data_mask")
        found_T[data_T] = LEFT_OUT
        found_T[~data_T] = PROMPT
    if step.head.objective == "reward":
        real = np.flatnonzero(step.real_T)
        found_T[found_T == LEFT_OUT] = RESPONSE
        found_T[real[_last_tokens(step)]] = SCORED
        return found_T
    if step.has("rollout_counts", "rollout_numbers", "numbers"):
        out = set(step.tensor("rollout_numbers")[~step.tensor("rollout_counts")])
        out_S = np.array([number in out for number in step.tensor("numbers")], dtype=bool)
        found_T[out_S[step.sequence_T] & (found_T != PROMPT)] = RESPONSE_LEFT_OUT
    found_T[step.tensor("loss_mask")] = TRAINED
    turns = turns_of(step)
    if turns is not None:
        between_T = (turns.turn_T > 0) & (turns.speaker_T != MODEL)
        found_T[between_T] = turns.speaker_T[between_T]
    first_T = (step.place_T == 0) & (found_T != TRAINED)
    found_T[first_T & (found_T != PROMPT)] = FIRST
    return found_T


def _turn_columns(step: AuditedStep) -> dict[str, np.ndarray]:
    turns = turns_of(step)
    if turns is None:
        return {}
    return {"speaker": turns.speaker_T[step.real_T], "turn": turns.turn_T[step.real_T]}


def _policy_columns(step: AuditedStep, shares: Shares) -> dict[str, np.ndarray]:
    if step.head.objective != "policy":
        return {}
    real_T, before_T = step.real_T, shares.before.logprobs_T
    held_T = step.tensor("loss_mask")[real_T]
    found: dict[str, np.ndarray] = {}
    names = {"advantages": "advantage", "corrections": "correction", "old_values": "old_value", "returns": "return"}
    for source, name in names.items():
        if step.has(source):
            found[name] = _of_held(step.tensor(source)[real_T], held_T)
    if before_T is None:
        return found
    if step.has("old_logprobs"):
        found["ratio"] = _of_held(np.exp(before_T - step.tensor("old_logprobs")[real_T]), held_T)
    if step.has("ref_logprobs"):
        found["kl"] = _of_held(before_T - step.tensor("ref_logprobs")[real_T], held_T)
    reward_T = _shaped_rewards(step)
    if reward_T is not None:
        found["reward"] = reward_T[real_T]
    return {**found, **_terms(step, shares, held_T)}


def _of_held(values_T: np.ndarray, held_T: np.ndarray) -> np.ndarray:
    """The values where a token carries loss; nothing elsewhere."""
    return np.where(held_T, values_T, np.nan)


def _terms(step: AuditedStep, shares: Shares, held_T: np.ndarray) -> dict[str, np.ndarray]:
    """The shares of the policy's loss, of the KL and of the entropy; and where the policy's has no slope."""
    if shares.moves.logprobs_T is None or shares.slopes.logprobs_T is None:
        return {}
    policy_T = slopes_of(step.under({"kl_in": "none"})).logprobs_T
    assert policy_T is not None
    found = {
        "share_policy": policy_T * shares.moves.logprobs_T,
        "share_kl": (shares.slopes.logprobs_T - policy_T) * shares.moves.logprobs_T,
    }
    if shares.slopes.entropies_T is not None and shares.moves.entropies_T is not None:
        found["share_entropy"] = shares.slopes.entropies_T * shares.moves.entropies_T
    if step.has("advantages"):
        pushed_T = held_T & (step.tensor("advantages")[step.real_T] != 0.0)
        found["clipped"] = pushed_T & (np.abs(policy_T) < 1e-9 * np.abs(policy_T).max(initial=1e-300))
    return found


def _shaped_rewards(step: AuditedStep) -> np.ndarray | None:
    """Return [T], each token's reward by its response; None where the record has no rewards of these."""
    if not step.has("rollout_rewards", "rollout_numbers", "rollout_lengths", "numbers", "data_mask"):
        return None
    begins = np.cumsum([0, *step.tensor("rollout_lengths")])
    rewards_R, found_T = step.tensor("rollout_rewards"), np.full(len(step.place_T), np.nan)
    for sequence, index in enumerate(_places_in_rollout(step)):
        if index < 0:
            return None
        drawn = np.flatnonzero((step.sequence_T == sequence) & step.tensor("data_mask"))
        own_R = rewards_R[begins[index] : begins[index + 1]]
        if len(drawn) != len(own_R):
            return None
        found_T[drawn] = own_R
    return found_T


def _of_sequences(step: AuditedStep, tokens: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    count = len(step.rank_S)
    sequence_T = tokens["sequence"]
    found: dict[str, np.ndarray] = {
        "sequence": np.arange(count),
        "rank": step.rank_S,
        "name": np.array([step.where("S", index) for index in range(count)], dtype=object),
        "tokens": np.bincount(sequence_T, minlength=count),
        "trained": np.bincount(sequence_T, tokens["role"] == TRAINED, minlength=count).astype(np.int64),
        "share": np.bincount(sequence_T, tokens["share"], minlength=count),
    }
    if "turn" in tokens:
        turns_S = np.zeros(count, dtype=np.int64)
        np.maximum.at(turns_S, sequence_T, tokens["turn"])
        found["turns"] = turns_S
    if step.has("chosen", "rejected"):
        pair_S, side_S = np.full(count, -1), np.full(count, "", dtype=object)
        for side in ("chosen", "rejected"):
            pair_S[step.tensor(side)] = np.arange(len(step.tensor(side)))
            side_S[step.tensor(side)] = side
        found |= {"pair": pair_S, "side": side_S}
    elif step.has("is_good"):
        found["side"] = np.where(step.tensor("is_good"), "good", "bad").astype(object)
    if step.has("scores"):
        found["score"] = step.tensor("scores")
    return {**found, **_of_rollout(step)}


def _of_rollout(step: AuditedStep) -> dict[str, np.ndarray]:
    """The rollout's numbers of each sequence."""
    if not step.has("rollout_numbers", "numbers"):
        return {}
    index_S = _places_in_rollout(step)
    if (index_S < 0).any():
        return {}
    names = {
        "rollout_groups": "group",
        "rollout_scores": "score",
        "rollout_counts": "counts",
        "rollout_ended": "ended",
    }
    return {name: step.tensor(source)[index_S] for source, name in names.items() if step.has(source)}


def _places_in_rollout(step: AuditedStep) -> np.ndarray:
    """Return [S], each sequence's place among the responses of the rollout; -1 for one that it does not have."""
    place = {int(number): index for index, number in enumerate(step.tensor("rollout_numbers"))}
    return np.array([place.get(int(number), -1) for number in step.tensor("numbers")])
