"""The squared loss of identity preference optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss

if TYPE_CHECKING:
    import torch


def of_margins(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Azar et al. 2023, equation 17, with beta for their tau."""
    return (margins_Q - 1.0 / (2.0 * objective.beta)).square()


# Azar et al. write whole responses, but their target 1 / (2 beta) does not grow with a response, so a sum would move
# long responses less per token; they advised TRL to average (huggingface.co/blog/pref-tuning), and beta means the same
# here as there.
LOSS = PreferenceLoss(
    "is the squared loss on log-probabilities per token (Azar et al. 2023)", of_margins, is_token_mean=True
)
