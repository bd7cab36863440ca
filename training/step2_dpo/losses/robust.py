"""Robust DPO: an estimate of DPO's loss that wrong labels leave unbiased."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss
from training.step2_dpo.losses.sigmoid import SmoothingArguments

if TYPE_CHECKING:
    import torch


def of_margins(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Chowdhury et al. 2024. Over labels of which the share `label_smoothing` is flipped its mean is the
    loss of right ones; it may be below 0."""
    from torch.nn.functional import logsigmoid

    rewards_Q, flipped = objective.beta * margins_Q, objective.options.label_smoothing
    right_Q, wrong_Q = -logsigmoid(rewards_Q), -logsigmoid(-rewards_Q)
    return ((1.0 - flipped) * right_Q - flipped * wrong_Q) / (1.0 - 2.0 * flipped)


LOSS = PreferenceLoss(
    "is DPO's, unbiased if the share --label_smoothing of pairs is wrong (Chowdhury et al. 2024)",
    of_margins,
    SmoothingArguments,
    loss_of_equal_pairs=lambda objective: math.log(2.0),
)
