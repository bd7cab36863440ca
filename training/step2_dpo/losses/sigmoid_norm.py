"""The loss of direct preference optimisation on log-ratios per token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss
from training.step2_dpo.losses.sigmoid import SmoothingArguments, smoothed

if TYPE_CHECKING:
    import torch


def of_margins(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """DPO's loss where a margin is the difference of two means over tokens: length-normalised DPO (Lambert et al. 2024,
    Tulu 3)."""
    return smoothed(objective.beta * margins_Q, objective.options.label_smoothing)


LOSS = PreferenceLoss(
    "is DPO on log-ratios per token (Lambert et al. 2024)",
    of_margins,
    SmoothingArguments,
    is_token_mean=True,
    loss_of_equal_pairs=lambda objective: math.log(2.0),
)
