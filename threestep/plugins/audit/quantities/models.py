"""The model of a record on its tokens: logits, scores, and the gradient of a loss.

S sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from threestep.plugins.audit.quantities.step import DERIVED, AuditedStep, LackingError
from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.machine import is_out_of_memory

if TYPE_CHECKING:
    from threestep.plugins.audit.references.llama import Llama, Slopes

# Sentences of packed rows whose attention is not held within a sequence, and whether positions begin again.
JOINED = {
    "packed sequences see each other: they are one sequence, with continuing positions": False,
    "packed sequences see each other, though their positions restart": True,
}
_MOST_LOGITS = 100_000_000  # in float64: 800 MB


def model_of(step: AuditedStep) -> Llama:
    """The model of the record; LackingError for one that no reference knows, or that has dropout."""
    if not step.head.model:
        raise LackingError("the model's configuration")
    weights = step.state("weights_before.")
    for name, what in (("dropout", "dropout"), ("embedding_noise", "noise on embeddings")):
        if float(step.settings.get(name, 0.0)):
            raise LackingError(f"a reference for {what}")

    def make() -> Llama:
        from threestep.plugins.audit.references.llama import Llama, why_unknown

        with _fitting():
            unknown = why_unknown(step.head.model)
            if unknown:
                raise LackingError(unknown)
            model = Llama(weights, step.head.model, is_rounded(step))
            model.check(step.tensor("token_ids")[step.real_T] if step.has("token_ids") else np.zeros(0, dtype=np.int64))
        return model

    return step.cached("model", make)


@contextmanager
def _fitting() -> Iterator[None]:
    """ThreestepError for a configuration with other values than its model type has, or of other weights: each has an
    error of its own."""
    try:
        yield
    except LackingError:
        raise
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        raise ThreestepError(
            "the weights and token ids in the record do not fit its model's configuration: "
            f"{type(problem).__name__}: {first_line(problem)}"
        ) from problem


def is_rounded(step: AuditedStep) -> bool:
    """True if the forward has half precision."""
    return str(step.settings.get("dtype", "fp32")) != "fp32"


def sequences_of(step: AuditedStep) -> list[np.ndarray]:
    """Each sequence's real tokens."""
    ids_T, real_T = step.tensor("token_ids"), step.real_T
    return [ids_T[(step.sequence_T == sequence) & real_T] for sequence in range(len(step.rank_S))]


Rows = tuple[list[np.ndarray], "list[np.ndarray] | None"]  # token ids, and their places


def joined_rows(step: AuditedStep, *, restarts: bool) -> Rows:
    """The sequences of each micro-batch as one run of tokens that see all before them. restarts: each sequence's places
    begin at 0. LackingError where rows were padded, or no two sequences share a micro-batch."""
    if not step.real_T.all() or not step.has("micro_batches"):
        raise LackingError("packed rows")
    sequences, firsts = sequences_of(step), np.flatnonzero(np.diff(step.micro_S, prepend=-1))
    if len(firsts) == len(sequences) or (np.diff(step.micro_S) < 0).any():
        raise LackingError("packed rows")
    groups = np.split(np.arange(len(sequences)), firsts[1:])
    ids = [np.concatenate([sequences[place] for place in group]) for group in groups]
    places = [np.concatenate([np.arange(len(sequences[place])) for place in group]) for group in groups]
    return ids, places if restarts else None


def joined_logits(step: AuditedStep, *, restarts: bool) -> np.ndarray:
    """Return [T, V], of packed rows whose sequences see each other; a first token's are 0, as in `model_logits`."""
    _check_size(step)
    found_TV = model_of(step).logits(*joined_rows(step, restarts=restarts))
    found_TV[step.place_T == 0] = 0.0
    return found_TV


def joined_gradients(step: AuditedStep, slopes: Slopes, *, restarts: bool) -> np.ndarray:
    """The gradient of all trained parameters, by name, of the same rows."""
    ids, places = joined_rows(step, restarts=restarts)
    found, _ = model_of(step).gradients(ids, slopes, places)
    return np.concatenate([found[name].reshape(-1) for name in step.state("gradients.")])


def _check_size(step: AuditedStep) -> None:
    vocabulary = int(step.head.model["vocab_size"])
    if len(step.real_T) * vocabulary > _MOST_LOGITS:
        raise LackingError(f"at most {_MOST_LOGITS:,} logits: it has {len(step.real_T) * vocabulary:,}")


def model_logits(step: AuditedStep) -> np.ndarray:
    """Return [T, V], 0 on padding."""
    model = model_of(step)
    vocabulary = int(step.head.model["vocab_size"])
    _check_size(step)

    def read() -> np.ndarray:
        found_TV = np.zeros((len(step.real_T), vocabulary))
        found_TV[step.real_T] = model.logits(sequences_of(step))
        return found_TV

    return step.cached("logits", read)


def model_scores(step: AuditedStep) -> np.ndarray:
    """Return [S]."""
    return step.cached("scores", lambda: model_of(step).scores(sequences_of(step)))


def dropout_draws(step: AuditedStep, place: str, count: int) -> np.ndarray:
    """Return [count, T], the tokens' log-probabilities of forwards with a dropout of 0.1 at a `place` of the model."""
    import torch

    from threestep.plugins.audit.references.llama import Dropout
    from threestep.plugins.audit.references.logprobs import logprobs

    _check_size(step)
    temperature, random = float(step.settings.get("temperature", 1.0)), torch.Generator().manual_seed(0)
    found = np.zeros((count, len(step.real_T)))
    for draw in range(count):
        read_TV = model_of(step).dropped_logits(sequences_of(step), Dropout(place, 0.1, random))
        found[draw, step.real_T] = logprobs(read_TV, step.tensor("token_ids")[step.real_T], temperature)
    return found


def model_values(step: AuditedStep) -> np.ndarray:
    """Return [T], the values of a critic, 0 on padding."""
    found_T = np.zeros(len(step.real_T))
    found_T[step.real_T] = model_of(step).values(sequences_of(step))
    return found_T


def model_gradients(step: AuditedStep, slopes: Slopes) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of all trained parameters, by name, and the sizes of its summands. slopes: of T tokens with
    padding."""
    from dataclasses import replace

    own = {
        name: getattr(slopes, name)[step.real_T]
        for name in ("logprobs_T", "normalizers_T", "entropies_T", "values_T")
        if getattr(slopes, name) is not None
    }
    both = model_of(step).gradients(sequences_of(step), replace(slopes, **own))
    trained = step.state("gradients.")
    sums, sizes = (np.concatenate([found[name].reshape(-1) for name in trained]) for found in both)
    return sums, sizes


def _derived_logits(step: AuditedStep) -> np.ndarray:
    if not step.has_state("weights_before."):
        raise LackingError("the tensor logits, or the weights")
    return model_logits(step)


DERIVED["logits"] = _derived_logits
