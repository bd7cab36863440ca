"""The likelihood of the best response: a part of other losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss, Responses, best_likelihood

if TYPE_CHECKING:
    import torch


def of_responses(responses: Responses, objective: Objective) -> torch.Tensor:
    """Each best response's mean negative log-likelihood a token (Pang et al. 2024, equation 1, the second term)."""
    return best_likelihood(responses)


LOSS = PreferenceLoss(
    "is the best response's negative log-likelihood per token, for sums",
    of_responses=of_responses,
    needs_reference=False,
)
