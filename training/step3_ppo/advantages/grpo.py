"""Group-relative advantages of GRPO and Dr. GRPO. Pure tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, group_centred
from training.step3_ppo.advantages.scaling import scaled

if TYPE_CHECKING:
    import torch


def grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: (R - mean) / (std + 1e-6) over the group, the same on all tokens of a response.

    Shao et al. 2024 (DeepSeekMath), section 4.1.2, with outcome supervision; std has denominator n - 1, and is the
    group's or that of the outcomes of all ranks (`scaling`). Without one, R - mean: Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783). A group of one gets 0.
    """
    centred_B = group_centred(inputs.outcomes_B, inputs.group_B)
    return inputs.on_tokens(scaled(centred_B, inputs.outcomes_B, inputs, settings)), None
