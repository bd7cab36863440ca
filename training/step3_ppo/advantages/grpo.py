"""Group-relative advantages of GRPO and Dr. GRPO. Pure tensors."""

from __future__ import annotations

import torch

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, group_centred, group_std

EPSILON = 1e-6  # as verl's; keeps groups of nearly equal outcomes finite


def grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: (R - mean) / (std + 1e-6) over the group, the same on all tokens of a response.

    Shao et al. 2024 (DeepSeekMath), section 4.1.2, with outcome supervision; std has denominator n - 1. Without
    `norm_by_std`, R - mean: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). A group of one gets 0.
    """
    advantages_B = group_centred(inputs.outcomes_B, inputs.group_B)
    if settings.norm_by_std:
        advantages_B = advantages_B / (group_std(inputs.outcomes_B, inputs.group_B) + EPSILON)
    return inputs.on_tokens(advantages_B), None
