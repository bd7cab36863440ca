"""The loss of direct preference optimisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss
from training.utils.flags.flags import flag_of
from training.utils.preference.arguments import PairLossArguments

if TYPE_CHECKING:
    import torch


@dataclass
class SigmoidArguments:
    """Flags of this loss."""

    label_smoothing: float = flag_of(
        PairLossArguments, "'sigmoid' only: share of pairs assumed to be ranked the wrong way round (conservative DPO)."
    )


def of_margins(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Rafailov et al. 2023, equation 7; smoothed as Mitchell 2023 (conservative DPO), equation 3."""
    from torch.nn.functional import logsigmoid

    rewards_Q, flipped = objective.beta * margins_Q, objective.options.label_smoothing
    return -(1.0 - flipped) * logsigmoid(rewards_Q) - flipped * logsigmoid(-rewards_Q)


LOSS = PreferenceLoss(
    "is DPO (Rafailov et al. 2023)", of_margins, SigmoidArguments, loss_of_equal_pairs=lambda objective: math.log(2.0)
)
