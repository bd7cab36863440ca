"""APO-zero: chosen responses become likelier, rejected ones less likely."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss, Responses, of_pairs

if TYPE_CHECKING:
    import torch


def of_responses(responses: Responses, objective: Objective) -> torch.Tensor:
    """D'Oosterlinck et al. 2024, equation 7: for models whose own responses are worse than the chosen ones."""
    return of_pairs(
        responses,
        lambda better_Q, worse_Q: 1.0 - (objective.beta * better_Q).sigmoid() + (objective.beta * worse_Q).sigmoid(),
    )


LOSS = PreferenceLoss(
    "is APO-zero (D'Oosterlinck et al. 2024)",
    of_responses=of_responses,
    loss_of_equal_pairs=lambda objective: 1.0,
)
