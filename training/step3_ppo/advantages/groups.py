"""Estimators that compare the samples of a prompt. Pure tensors.

B sequences, R response tokens, G groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo.advantages.inputs import (
    AdvantageInputs,
    AdvantageSettings,
    group_centred,
    group_sizes,
    scaled,
)

if TYPE_CHECKING:
    import torch


def grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: (R - mean) / (std + 1e-6) over the group, the same on all tokens of a response.

    Shao et al. 2024 (DeepSeekMath), section 4.1.2, with outcome supervision; std has denominator n - 1, and is the
    group's or that of the outcomes of all ranks (`scaled`). Without one, R - mean: Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783). A group of one gets 0.
    """
    centred_B = group_centred(inputs.outcomes_B, inputs.group_B)
    return inputs.on_tokens(scaled(centred_B, inputs.outcomes_B, inputs, settings)), None


def rloo(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: R - mean of the others in the group, which is n / (n - 1) (R - mean of all n).

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740), section 3.1. A group of one gets 0. TRL's RLOO divides
    by the standard deviation of these advantages over the batch; divided by the group's (`scaled`) they are GRPO's,
    times a constant.
    """
    sizes_B = group_sizes(inputs.group_B)
    centred_B = group_centred(inputs.outcomes_B, inputs.group_B)
    advantages_B = centred_B * sizes_B / (sizes_B - 1).clamp(min=1)
    return inputs.on_tokens(scaled(advantages_B, advantages_B, inputs, settings, usual=None)), None
