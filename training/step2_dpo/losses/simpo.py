"""SimPO: log-probabilities per token as the reward, without a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss
from training.step2_dpo.losses.sigmoid import SmoothingArguments, smoothed
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    import torch


@dataclass
class SimpoArguments(SmoothingArguments):
    """Flags of this loss."""

    simpo_gamma: float = flag(
        0.5, "'simpo' only: margin by which beta times the difference of log-probabilities is to exceed 0.", "nats >= 0"
    )


def of_margins(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Meng et al. 2024, equation 6. A margin is the difference of two mean log-probabilities a token."""
    rewards_Q = objective.beta * margins_Q - objective.options.simpo_gamma
    return smoothed(rewards_Q, objective.options.label_smoothing)


def _of_equal_pairs(objective: Objective) -> float:
    gamma, flipped = objective.options.simpo_gamma, objective.options.label_smoothing
    return (1.0 - flipped) * math.log1p(math.exp(gamma)) + flipped * math.log1p(math.exp(-gamma))


LOSS = PreferenceLoss(
    "is SimPO, on log-probabilities per token without a reference; take --beta 2 to 10 (Meng et al. 2024)",
    of_margins,
    SimpoArguments,
    is_token_mean=True,
    needs_reference=False,
    loss_of_equal_pairs=_of_equal_pairs,
)
