"""APO-down: both responses become less likely, rejected ones more so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss, Responses, of_pairs

if TYPE_CHECKING:
    import torch


def of_responses(responses: Responses, objective: Objective) -> torch.Tensor:
    """D'Oosterlinck et al. 2024, equation 8: for models whose own responses are better than the chosen ones."""
    beta = objective.beta
    return of_pairs(
        responses,
        lambda better_Q, worse_Q: (beta * better_Q).sigmoid() + 1.0 - (beta * (better_Q - worse_Q)).sigmoid(),
    )


LOSS = PreferenceLoss("is APO-down (D'Oosterlinck et al. 2024)", of_responses=of_responses)
