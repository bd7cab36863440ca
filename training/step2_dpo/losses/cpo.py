"""Contrastive preference optimisation, without a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss, Responses, best_likelihood, of_pairs
from training.step2_dpo.losses.sigmoid import SmoothingArguments, smoothed
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    import torch


@dataclass
class CpoArguments(SmoothingArguments):
    """Flags of this loss."""

    cpo_alpha: float = flag(
        1.0, "'cpo' only: weight of the best response's negative log-likelihood per token.", "factor >= 0"
    )


def of_responses(responses: Responses, objective: Objective) -> torch.Tensor:
    """Xu et al. 2024: DPO's loss under a uniform reference (their equation 3), and the likelihood of the best response,
    here a mean over its tokens."""
    beta, options = objective.beta, objective.options
    preference = of_pairs(
        responses, lambda better_Q, worse_Q: smoothed(beta * (better_Q - worse_Q), options.label_smoothing)
    )
    return preference + options.cpo_alpha * best_likelihood(responses)


LOSS = PreferenceLoss(
    "is CPO, without a reference (Xu et al. 2024)",
    flags=CpoArguments,
    of_responses=of_responses,
    needs_reference=False,
)
