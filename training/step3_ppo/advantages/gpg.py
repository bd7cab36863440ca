"""Group policy gradient (GPG). Pure tensors."""

from __future__ import annotations

import torch

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, group_centred, group_sums


def gpg(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: alpha (R - mean of the group), the same on all tokens of a response.

    alpha = B / (B - M) over all ranks, where M sequences are in groups of equal outcomes, which teach nothing
    (Chu et al. 2025, arXiv:2504.02546, with F_norm 1). A group of one is such a group.
    """
    outcomes_B, group_B = inputs.outcomes_B, inputs.group_B
    _, place_B = torch.unique(group_B, return_inverse=True)
    least_G = torch.full_like(outcomes_B, torch.inf).scatter_reduce(0, place_B, outcomes_B, "amin")  # at most B groups
    differs_B = outcomes_B != least_G[place_B]
    teaches_B = group_sums(differs_B.double(), group_B) > 0
    count, teaching = inputs.over_ranks(
        torch.stack([torch.ones_like(outcomes_B).sum(), teaches_B.double().sum()])
    ).unbind()
    alpha = count / teaching.clamp(min=1.0)
    centred_B = torch.where(teaches_B, group_centred(outcomes_B, group_B), 0.0)
    return inputs.on_tokens(alpha * centred_B), None
