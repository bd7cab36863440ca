"""REINFORCE with a leave-one-out baseline. Pure tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, group_centred, group_sizes
from training.step3_ppo.advantages.scaling import scaled

if TYPE_CHECKING:
    import torch


def rloo(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: R - mean of the others in the group, which is n / (n - 1) (R - mean of all n).

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740), section 3.1. A group of one gets 0. TRL's RLOO divides
    by the standard deviation of these advantages over the batch; divided by the group's (`scaling`) they are GRPO's,
    times a constant.
    """
    sizes_B = group_sizes(inputs.group_B)
    centred_B = group_centred(inputs.outcomes_B, inputs.group_B)
    advantages_B = centred_B * sizes_B / (sizes_B - 1).clamp(min=1)
    return inputs.on_tokens(scaled(advantages_B, advantages_B, inputs, settings, usual=None)), None
