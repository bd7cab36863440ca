"""The loss of direct preference optimisation, and labels that are wrong with some probability: the file also serves the
other losses that take `--label_smoothing`."""

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
class SmoothingArguments:
    """Flags of losses with label smoothing."""

    label_smoothing: float = flag_of(
        PairLossArguments,
        "'sigmoid', 'sigmoid_norm', 'cpo', 'simpo' (as in conservative DPO) and 'robust': share of pairs assumed to be "
        "ranked the wrong way round.",
    )


def smoothed(rewards_Q: torch.Tensor, flipped: float) -> torch.Tensor:
    """Return [Q], the cross-entropy of the preference sigmoid(reward) against a label that is wrong with probability
    `flipped` (Mitchell 2023, conservative DPO, equation 3). rewards_Q: of the better response minus the worse."""
    from torch.nn.functional import logsigmoid

    return -(1.0 - flipped) * logsigmoid(rewards_Q) - flipped * logsigmoid(-rewards_Q)


def of_margins(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Rafailov et al. 2023, equation 7; smoothed as Mitchell 2023 (conservative DPO), equation 3."""
    return smoothed(objective.beta * margins_Q, objective.options.label_smoothing)


LOSS = PreferenceLoss(
    "is DPO (Rafailov et al. 2023)", of_margins, SmoothingArguments, loss_of_equal_pairs=lambda objective: math.log(2.0)
)
