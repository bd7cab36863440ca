"""Group-relative advantages for the best of k. Pure tensors.

B sequences, R response tokens, G groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from training.step3_ppo.advantages.scaling import scaled

if TYPE_CHECKING:
    from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings


def grpo_passk(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: for the best response of each group its lead over the second, 0 for all others.

    best - second, over std + 1e-6 (`scaling`) or not: what the group's maximum would lose without its best member
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
