"""Group-relative advantages for the best of k. Pure tensors.

B sequences, R response tokens, G groups.
"""

from __future__ import annotations

import torch

from training.step3_ppo.advantages.grpo import EPSILON
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, group_std


def grpo_passk(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: for the best response of each group its lead over the second, 0 for all others.

    best - second, over std + 1e-6 with `norm_by_std`: what the group's maximum would lose without its best member
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
    if settings.norm_by_std:
        lead_G = lead_G / (group_std(outcomes_B, group_B)[best_G] + EPSILON)
    return inputs.on_tokens(torch.zeros_like(outcomes_B).index_copy(0, best_G, lead_G)), None
