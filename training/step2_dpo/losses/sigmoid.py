"""The loss of direct preference optimisation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss
from training.step2_dpo.losses.smoothing import SmoothingArguments, smoothed

if TYPE_CHECKING:
    import torch


def of_margins(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Rafailov et al. 2023, equation 7; smoothed as Mitchell 2023 (conservative DPO), equation 3."""
    return smoothed(objective.beta * margins_Q, objective.options.label_smoothing)


LOSS = PreferenceLoss(
    "is DPO (Rafailov et al. 2023)", of_margins, SmoothingArguments, loss_of_equal_pairs=lambda objective: math.log(2.0)
)
