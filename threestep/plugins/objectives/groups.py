"""Estimators that compare the samples of a prompt. Pure tensors.

B sequences, R response tokens, G groups.
"""

from __future__ import annotations

import torch

from training.step3_ppo.advantages.inputs import (
    AdvantageInputs,
    AdvantageSettings,
    group_centred,
    group_sums,
    scaled,
)


def grpo_passk(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: for the best response of each group its lead over the second, 0 for all others.

    best - second, over std + 1e-6 (`scaled`) or not: what the group's maximum would lose without its best member
    (Tang et al. 2025, arXiv:2503.19595, the leave-one-out baseline of max@k). The lead of two equally good ones is 0.
    A group of one gets 0.
    """
    outcomes_B, group_B = inputs.outcomes_B, inputs.group_B
    _, place_B, sizes_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    order_B = torch.argsort(outcomes_B, descending=True, stable=True)
    order_B = order_B[torch.argsort(place_B[order_B], stable=True)]  # group by group, the best first
    first_G = sizes_G.cumsum(0) - sizes_G
    best_G = order_B[first_G]
    second_G = order_B[torch.where(sizes_G > 1, first_G + 1, first_G)]
    lead_G = outcomes_B[best_G] - outcomes_B[second_G]
    advantages_B = torch.zeros_like(outcomes_B).index_copy(0, best_G, lead_G)
    return inputs.on_tokens(scaled(advantages_B, outcomes_B, inputs, settings)), None


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


def gpg(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: alpha (R - mean of the group), the same on all tokens of a response.

    alpha = B / (B - M) over all ranks, where M sequences are in groups of equal outcomes, which teach nothing
    (Chu et al. 2025, arXiv:2504.02546, with F_norm 1). A group of one is such a group.
    """
    centred_B = group_centred(inputs.outcomes_B, inputs.group_B)
    teaches_B = group_sums(centred_B.abs(), inputs.group_B) > 0
    count, teaching = inputs.over_ranks(
        torch.stack([torch.ones_like(centred_B).sum(), teaches_B.double().sum()])
    ).unbind()
    alpha = count / teaching.clamp(min=1.0)
    return inputs.on_tokens(alpha * centred_B), None
