"""No advantages: the policy learns from a teacher alone. Pure tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings


def none(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR of 0: the policy's loss and its gradient are 0."""
    return torch.zeros_like(inputs.rewards_BR), None
