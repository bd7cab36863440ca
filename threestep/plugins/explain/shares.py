"""Each token's share of what a step did to the loss, to first order.

The loss is a function of the log-probabilities, entropies and log Z of its tokens, or of scores. A token's share of a
direction d of the weights is

    dL/dlogprob * (dlogprob/dw . d) + dL/dentropy * (dentropy/dw . d) + dL/dlog Z * (dlog Z/dw . d)

so that the shares sum to dL/dw . d. S sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from threestep.plugins.audit.quantities.backward import SLOPES
from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.explain.forward.model import Reads, RecordedModel, read_sequences
from threestep.plugins.explain.updates import dot
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from threestep.plugins.explain.updates import Update

# Of a log-probability recorded in half precision, and in float32: what a forward of ours may differ by.
_ROUNDING = {"fp32": 1e-3}
_HALF_ROUNDING = 0.2


def model_of(step: AuditedStep, kind: str = "weights_before.", dtype: torch.dtype = torch.float64) -> RecordedModel:
    """The model before or after the step. ThreestepError for one with dropout: its forward was another."""
    for name in ("dropout", "embedding_noise"):
        if float(step.settings.get(name, 0.0)):
            raise ThreestepError(
                f"an explanation needs a step without {name.replace('_', ' ')}, got {step.settings[name]}: its "
                "random draws are not recorded"
            )
    if not step.head.model:
        raise LackingError("the model's configuration")

    def make() -> RecordedModel:
        if kind != "weights_before.":
            return model_of(step, dtype=dtype).with_weights({**step.state("weights_before."), **step.state(kind)})
        return RecordedModel(
            step.state(kind),
            step.head.model,
            temperature=float(step.settings.get("temperature", 1.0)),
            scores=step.head.objective == "reward",
            dtype=dtype,
        )

    return step.cached(f"explained {kind} {dtype}", make)


def slopes_of(step: AuditedStep) -> Reads:
    """The loss's derivative by what the model says of each token. LackingError for a loss with terms of its own."""
    if step.settings.get("other_terms"):
        raise LackingError("a reference for the other terms of the loss")
    found = SLOPES[step.head.objective](step, None)
    real_T = step.real_T
    by_token = {
        f"{name}_T": None if values is None else values[real_T]
        for name in ("logprobs", "normalizers", "entropies")
        for values in (getattr(found, f"{name}_T"),)
    }
    return Reads(**by_token, scores_S=found.scores_S)


def derivative(slopes: Reads, moves: Reads) -> np.ndarray:
    """The loss's derivative along a direction, by token [T]; of a reward model by sequence [S]."""
    if slopes.scores_S is not None:
        assert moves.scores_S is not None
        return slopes.scores_S * moves.scores_S
    assert moves.logprobs_T is not None
    found_T = np.zeros(len(moves.logprobs_T))
    for name in ("logprobs_T", "normalizers_T", "entropies_T"):
        slope_T = getattr(slopes, name)
        if slope_T is not None:
            found_T += slope_T * getattr(moves, name)
    return found_T


@dataclass(frozen=True)
class Shares:
    """Shares of the change of the loss along the update, by token [T], or by sequence [S] of a reward model.

    whole: along the update that the optimizer took. parts: along each of its parts (`PARTS`). before, after: what the
    model says of each token before and after the step. moves: its derivatives along the update. slopes: of the loss.
    """

    whole: np.ndarray
    parts: Mapping[str, np.ndarray]
    before: Reads
    after: Reads
    moves: Reads
    slopes: Reads

    @property
    def is_of_sequences(self) -> bool:
        return self.slopes.scores_S is not None


PARTS = ("gradient", "earlier", "decay", "plain")  # of an `Update`
_ROUNDED_AWAY = 1e-2  # of the update's length: rounding of the weights that is not told apart from the gradient
_SMALL = 100_000  # weights, up to which passes in double cost nothing that is noticed


def shares_of(step: AuditedStep, update: Update, *, plain: bool = False, dtype: torch.dtype | None = None) -> Shares:
    """Return the shares of a step. ThreestepError if the model is not the one whose numbers are recorded.

    plain: shares along plain gradient descent too. dtype: of the passes; None: float32 above 100,000 weights, which is
    right to 1e-6 of the sum of the shares' sizes. The share of this step's gradient is the whole less the other parts;
    where rounding of the weights is much of the update, as of weights in bf16, it has a pass of its own.
    """
    if dtype is None:
        weights = sum(value.size for value in update.whole.values())
        dtype = torch.float64 if weights <= _SMALL else torch.float32
    slopes, sequences = slopes_of(step), read_sequences(step)
    rounding = update.rounding
    is_rounded = dot(rounding, rounding) > _ROUNDED_AWAY**2 * dot(update.whole, update.whole)
    names = ["whole", *(name for name in PARTS if {"gradient": is_rounded, "plain": plain}.get(name, True))]
    moving = [name for name in names if any(value.any() for value in getattr(update, name).values())]
    directions = [update.shrinks if name == "decay" else getattr(update, name) for name in moving or ["whole"]]
    before, moves = model_of(step, dtype=dtype).along_all(sequences, directions)
    check_forward(step, before)
    found = {name: derivative(slopes, own) for name, own in zip(moving, moves, strict=False)}
    still = np.zeros_like(derivative(slopes, moves[0]))
    parts = {name: found.get(name, still) for name in PARTS if name != "plain" or plain}
    if not is_rounded:
        parts["gradient"] = found.get("whole", still) - parts["earlier"] - parts["decay"]
    after = model_of(step, "weights_after.", dtype).read(sequences)
    return Shares(found.get("whole", still), parts, before, after, moves[0], slopes)


def check_forward(step: AuditedStep, before: Reads) -> None:
    """ThreestepError if the forward's numbers are not the recorded ones."""
    if before.scores_S is not None:
        recorded, found, name = step.tensor("scores"), before.scores_S, "scores"
    elif step.has("logprobs") and before.logprobs_T is not None:
        held_T = step.tensor("loss_mask")[step.real_T]
        recorded, found = step.tensor("logprobs")[step.real_T][held_T], before.logprobs_T[held_T]
        name = "log-probabilities"
    else:
        return
    rounding = _ROUNDING.get(str(step.settings.get("dtype", "fp32")), _HALF_ROUNDING)
    apart = float(np.abs(recorded - found).max(initial=0.0))
    if not np.isfinite(recorded).all() or not apart <= rounding * (1.0 + float(np.abs(recorded).max(initial=0.0))):
        raise ThreestepError(
            f"an explanation requires the recorded {name} to match those computed from the recorded weights, but they "
            f"differ by {apart:.3g}: the model had extra parts in this step, or its rows were not plain sequences"
        )
