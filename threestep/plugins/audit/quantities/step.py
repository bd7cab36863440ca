"""A record as the judge reads it: all ranks joined, and a name for what is missing.

S sequences, T tokens, P pairs, B responses, R drawn tokens, all of all ranks.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.audit.recording.schema import CRITIC, TENSORS
from threestep.plugins.audit.references.kl import ESTIMATORS
from threestep.plugins.audit.references.logprobs import logprobs
from threestep.plugins.audit.references.reductions import Units
from threestep.plugins.audit.references.rewards import at_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from threestep.plugins.audit.recording.files import StepRecord


# Settings that the actor's optimizer has, and the critic's has of its own.
_OF_OPTIMIZER = (
    *("max_grad_norm", "beta1", "beta2", "adam_epsilon", "weight_decay", "updates_before", "master_dtype", "schedule"),
    *("peak_learning_rate", "adapter_learning_rate", "warmup_steps", "total_steps", "init_lr_ratio", "min_lr_ratio"),
    *("num_cycles", "stable_ratio", "dropout"),
)


class LackingError(LookupError):
    """The record lacks a part; the judge names it."""


# What a named estimator has where nothing else is said: GRPO's group divides, and nothing divides for others.
_BY_GROUP = ("grpo", "grpo_passk")
_WHITENED = ("gae", "reinforce++", "reinforce++_baseline")


def with_implied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, and before them what their estimator implies."""
    if "advantage" not in settings:
        return dict(settings)
    norm_by = "group" if settings["advantage"] in _BY_GROUP else "none"
    return {"norm_by": norm_by, "whiten": settings["advantage"] in _WHITENED, **settings}


class AuditedStep:
    """A record. settings: those of the record, and over them the user's."""

    def __init__(self, record: StepRecord, settings: Mapping[str, Any] | None = None) -> None:
        self.head = record.head
        own, said = record.head.settings, settings or {}
        is_other = said.get("advantage") != own.get("advantage")
        self.settings = {**with_implied(own), **(with_implied(said) if is_other else said)}
        self._ranks, self._state = record.ranks, record.state
        self._joined: dict[str, np.ndarray] = {}
        self._replaced: dict[str, np.ndarray] = {}
        self._cache: dict[str, Any] = {}

    def cached(self, name: str, compute: Callable[[], Any]) -> Any:
        """Compute once what many causes need."""
        if name not in self._cache:
            self._cache[name] = compute()
        return self._cache[name]

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as recorded; one that is missing and follows from others is computed."""
        if name in self._replaced:
            return self._replaced[name]
        if name in DERIVED and not self.has(name):
            return DERIVED[name](self)
        return self.recorded(name)

    def recorded(self, name: str) -> np.ndarray:
        """All ranks' tensor: floats as float64, pairs as indices into all ranks' sequences."""
        if name not in self._joined:
            parts = [rank[name] for rank in self._ranks if name in rank]
            if len(parts) < len(self._ranks):
                some = f" of {len(self._ranks) - len(parts)} ranks" if parts else ""
                raise LackingError(f"the tensor {name}{some}")
            if name in ("chosen", "rejected"):
                begins = np.cumsum([0, *(len(rank["lengths"]) for rank in self._ranks)])
                parts = [part + begin for part, begin in zip(parts, begins, strict=False)]
            whole = np.concatenate(parts)
            self._joined[name] = whole.astype(np.float64) if TENSORS[name].kind == "f" else whole
        return self._joined[name]

    def has(self, *names: str) -> bool:
        return all(name in self._replaced or all(name in rank for rank in self._ranks) for name in names)

    @property
    def has_critic(self) -> bool:
        """True for GAE, which needs a critic, and if the record holds anything of one. An estimator of a user's own has
        no name in a record."""
        if self.settings.get("advantage") == "gae":
            return True
        names = {*self.head.figures, *self._state, *(name for rank in self._ranks for name in rank)}
        return bool(self.head.critic) or any("value" in name or name.startswith(CRITIC) for name in names)

    @property
    def corrects(self) -> bool:
        """True for a step that weights tokens against a mismatch between rollout and training."""
        return "mismatch_correction" in self.settings or self.has("corrections") or self.has("rollout_corrections")

    def replaced(self, **tensors: np.ndarray) -> AuditedStep:
        """The same step with other tensors, of all ranks."""
        other = copy(self)
        other._replaced, other._cache = {**self._replaced, **tensors}, {}
        return other

    def under(self, settings: Mapping[str, Any]) -> AuditedStep:
        """The same step with other settings over its own."""
        other = copy(self)
        other.settings, other._cache = {**self.settings, **settings}, {}
        return other

    def setting(self, name: str) -> Any:
        if name not in self.settings:
            raise LackingError(f"the setting {name}")
        return self.settings[name]

    def figure(self, name: str) -> float:
        if name not in self.head.figures:
            raise LackingError(f"the figure {name}")
        return float(self.head.figures[name])

    def state(self, kind: str) -> dict[str, np.ndarray]:
        """The whole model's, by parameter."""
        found = {name.removeprefix(kind): values for name, values in self._state.items() if name.startswith(kind)}
        if not found:
            raise LackingError(f"the state {kind}NAME")
        return {name: found[name].astype(np.float64) for name in sorted(found)}

    def has_state(self, kind: str) -> bool:
        return any(name.startswith(kind) for name in self._state)

    def norms(self, kind: str) -> dict[str, float]:
        """The norm of each parameter's state, from its digest or its values."""
        if self.has_state(kind):
            return {name: float(np.linalg.norm(values)) for name, values in self.state(kind).items()}
        digests = self.head.digests
        found = {name.removeprefix(kind): each["norm"] for name, each in digests.items() if name.startswith(kind)}
        if not found:
            raise LackingError(f"the state {kind}NAME, or its digests")
        return found

    def critic(self) -> AuditedStep:
        """The step as the critic takes it: its model, state, settings and figures in the actor's place."""
        if not self.head.critic:
            raise LackingError("the critic's model and state")

        def of_critic() -> AuditedStep:
            figures, other = self.head.figures, copy(self)
            own = {
                name: figures[f"{CRITIC}{name}"] for name in ("grad_norm", "learning_rate") if CRITIC + name in figures
            }
            other.head = replace(
                self.head, objective="critic", figures=own, digests={}, model=self.head.critic["model"]
            )
            shared = {name: value for name, value in self.settings.items() if name not in _OF_OPTIMIZER}
            terms = bool(self.settings.get("other_critic_terms", False))
            other.settings = {**shared, **self.head.critic["settings"], "temperature": 1.0, "other_terms": terms}
            other._state = {
                name.removeprefix(CRITIC): each for name, each in self._state.items() if name.startswith(CRITIC)
            }
            other._cache = {}
            return other

        return self.cached("critic", of_critic)

    # --- places

    @property
    def by_rank(self) -> Sequence[Mapping[str, np.ndarray]]:
        """The tensors of each rank, as recorded."""
        return self._ranks

    @cached_property
    def ranks(self) -> int:
        return len(self._ranks)

    @cached_property
    def rank_S(self) -> np.ndarray:
        return np.repeat(np.arange(self.ranks), [len(rank["lengths"]) for rank in self._ranks])

    @cached_property
    def micro_S(self) -> np.ndarray:
        """Micro-batches numbered over all ranks: rank after rank."""
        return self.tensor("micro_batches") + self._first_micro[self.rank_S]

    @cached_property
    def _first_micro(self) -> np.ndarray:
        return np.cumsum([0, *self._micro_counts])

    @cached_property
    def _micro_counts(self) -> list[int]:
        return [
            len(rank["micro_losses"]) if "micro_losses" in rank else int(rank["micro_batches"].max(initial=-1)) + 1
            for rank in self._ranks
        ]

    @cached_property
    def micro_batches(self) -> int:
        return sum(self._micro_counts) if self.has("micro_batches") else self.ranks

    @cached_property
    def sequence_T(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.rank_S)), self.tensor("lengths"))

    @cached_property
    def place_T(self) -> np.ndarray:
        return _places(self.tensor("lengths"))

    @cached_property
    def real_T(self) -> np.ndarray:
        return self.tensor("is_real") if self.has("is_real") else np.ones(len(self.sequence_T), dtype=bool)

    @cached_property
    def response_R(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.tensor("rollout_lengths"))), self.tensor("rollout_lengths"))

    @cached_property
    def counts_R(self) -> np.ndarray:
        """bool, tokens of responses that count."""
        if not self.has("rollout_counts"):
            return np.ones(len(self.response_R), dtype=bool)
        return self.tensor("rollout_counts")[self.response_R]

    @cached_property
    def rollout_rank_B(self) -> np.ndarray:
        return np.repeat(np.arange(self.ranks), [len(rank["rollout_lengths"]) for rank in self._ranks])

    # --- units of a loss

    def token_units(self, values_T: np.ndarray) -> Units:
        """Losses of tokens, of which those of the loss mask count."""
        return Units(
            values_T,
            self.tensor("loss_mask").astype(np.float64),
            self.sequence_T,
            self._of_micro(self.sequence_T),
            self.rank_S[self.sequence_T],
            self.micro_batches,
            self.ranks,
            float(self.settings.get("longest_tokens", np.nan)),
            float(self.settings.get("accumulation_steps", 0.0)),
        )

    def pair_units(self, values_P: np.ndarray) -> Units:
        """Losses of pairs."""
        chosen_P = self.tensor("chosen")
        weights_P = self.tensor("pair_weights") if self.has("pair_weights") else np.ones(len(chosen_P))
        return Units(
            values_P,
            weights_P,
            np.arange(len(chosen_P)),
            self._of_micro(chosen_P),
            self.rank_S[chosen_P],
            self.micro_batches,
            self.ranks,
            full=float(self.settings.get("accumulation_steps", 0.0)),
        )

    def sequence_units(self, values_S: np.ndarray) -> Units:
        """Losses of whole sequences, which all count."""
        place_S = np.arange(len(values_S))
        return Units(
            values_S,
            np.ones(len(values_S)),
            place_S,
            self._of_micro(place_S),
            self.rank_S,
            self.micro_batches,
            self.ranks,
            full=float(self.settings.get("accumulation_steps", 0.0)),
        )

    def _of_micro(self, sequence: np.ndarray) -> np.ndarray:
        return self.micro_S[sequence] if self.has("micro_batches") else self.rank_S[sequence]

    def sequence_sums(self, values_T: np.ndarray) -> np.ndarray:
        """Return [S], the sum of each sequence's values."""
        return np.bincount(self.sequence_T, values_T, minlength=len(self.rank_S))

    def response_sums(self, values_R: np.ndarray) -> np.ndarray:
        """Return [B], the sum of each response's values."""
        return np.bincount(self.response_R, values_R, minlength=len(self.tensor("rollout_lengths")))

    # --- words

    def where(self, axis: str, index: int) -> str:
        """Say where an entry of a tensor stands."""
        if axis == "T":
            sequence, place = int(self.sequence_T[index]), int(self.place_T[index])
            ids = f" (token id {int(self.tensor('token_ids')[index])})" if self.has("token_ids") else ""
            return f"{self._sequence(sequence)}, token {place}{ids}"
        if axis == "TV":
            vocabulary = self.tensor("logits").shape[1]
            return f"{self.where('T', index // vocabulary)}, the logit of {index % vocabulary}"
        if axis == "S":
            return self._sequence(index)
        if axis == "P":
            return f"the pair of {self._sequence(int(self.tensor('chosen')[index]))} and its rejected response"
        if axis == "R":
            response = int(self.response_R[index])
            place = int(_places(self.tensor("rollout_lengths"))[index])
            return f"response {self._number(response)}, drawn token {place}"
        if axis == "B":
            return f"response {self._number(index)}"
        if axis == "CW":
            return f"the critic's {self.critic()._parameter(index)}"
        if axis == "W":
            return self._parameter(index)
        rank = int(np.searchsorted(self._first_micro, index, side="right")) - 1
        return f"micro-batch {index - int(self._first_micro[rank])} of rank {rank}"

    def _parameter(self, index: int) -> str:
        """The parameter, and the place in it, of a number among those of all trained parameters by name."""
        trained = next(kind for kind in ("exp_avg.", "gradients.", "weights_after.") if self.has_state(kind))
        for name, values in self.state(trained).items():
            if index < values.size:
                return f"{name} {list(map(int, np.unravel_index(index, values.shape)))}"
            index -= values.size
        return "a weight"

    def _sequence(self, sequence: int) -> str:
        own = f"row {int(self.tensor('rows')[sequence])}" if self.has("rows") else f"sequence {sequence}"
        if not self.has("rows") and self.has("numbers"):
            own = f"response {int(self.tensor('numbers')[sequence])}"
        return f"{own} of rank {int(self.rank_S[sequence])}" if self.ranks > 1 else own

    def _number(self, response: int) -> int:
        return int(self.tensor("rollout_numbers")[response]) if self.has("rollout_numbers") else response


def _places(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... for each of the lengths, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


def _sums_of(name: str) -> Callable[[AuditedStep], np.ndarray]:
    def compute(step: AuditedStep) -> np.ndarray:
        return step.sequence_sums(np.where(step.tensor("loss_mask"), step.tensor(name), 0.0))

    return compute


def _read_logits(step: AuditedStep) -> np.ndarray:
    temperature = float(step.settings.get("temperature", 1.0))
    return logprobs(step.tensor("logits"), step.tensor("token_ids"), temperature)


def _scores_at_ends(step: AuditedStep) -> np.ndarray:
    """Rewards by their scores, and the KL if it is in them."""
    scores_R = at_ends(step.recorded("rollout_scores"), step.tensor("rollout_lengths"))
    if step.setting("kl_in") != "reward":
        return scores_R
    estimate = ESTIMATORS[str(step.setting("kl_estimator"))]
    kl_R = estimate(step.recorded("rollout_old_logprobs"), step.recorded("rollout_ref_logprobs"))
    return scores_R - float(step.setting("kl_coef")) * kl_R


# Tensors that follow from others, for records that lack them; `models` adds the logits.
DERIVED: dict[str, Callable[[AuditedStep], np.ndarray]] = {
    "logprobs": _read_logits,
    "logprob_sums": _sums_of("logprobs"),
    "ref_logprob_sums": _sums_of("ref_logprobs"),
    "rollout_rewards": _scores_at_ends,
}
