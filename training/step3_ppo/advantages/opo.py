"""On-policy RL with the optimal reward baseline (OPO). Pure tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, group_centred, group_sums

if TYPE_CHECKING:
    import torch


def opo(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: R - sum(length R) / sum(length) over the group, the same on all tokens of a response.

    Hao et al. 2025 (arXiv:2505.23585): the baseline of least variance if gradients of tokens are orthogonal and of
    similar size. A group of one gets 0.
    """
    lengths_B = inputs.response_lengths_B.double()
    # Relative to the group's mean, which is exact where all are equal: the baseline then is what they are.
    centred_B = group_centred(inputs.outcomes_B, inputs.group_B)
    weighted_B = group_sums(lengths_B * centred_B, inputs.group_B)
    return inputs.on_tokens(centred_B - weighted_B / group_sums(lengths_B, inputs.group_B)), None
