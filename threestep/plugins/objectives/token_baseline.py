"""The optimal token baseline (OTB), a baseline for each place in a response. Pure tensors.

B sequences, R response tokens, M tokens inside the responses, K pairs of a group and a place.
"""

from __future__ import annotations

import torch

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, discounted_sums


def optimal_token_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: G_t - B_t, with G_t = r_t + G_{t+1}, over the group's responses that have a token at t:

    B_t = sum(G_t W_t) / sum(W_t),  W_t = w_1 + ... + w_t,  w_j = 1 - 2 p_j + sum over the vocabulary of p^2

    Li et al. 2026 (arXiv:2602.07078): the baseline of least variance, if the square of a token's gradient is that of
    the gradient by its logits, w_j. p is the policy that rolled out; with weights against a mismatch w_j is multiplied
    by the square of its token's weight. Where all W_t are 0 (one token has all probability), B_t is the plain mean.

    Tokens of the longest response beyond the end of all others are compared with nothing: with `otb_zero_tail` B_t is 0
    there and the token learns from its return, without it B_t is that return and the token learns nothing. A group of
    one is all tail.

    Columns are drawn tokens alone. Responses of tool-integrated reasoning, whose observations have any length, are thus
    compared after equally many drawn tokens (verl's `tir_optimal_token_baseline`).
    """
    if inputs.logprobs_BR is None or inputs.collisions_BR is None:
        raise AssertionError("the optimal token baseline needs the policy's probabilities")
    inside_BR, width = inputs.inside_BR, inputs.rewards_BR.shape[1]
    returns_BR = discounted_sums(torch.where(inside_BR, inputs.rewards_BR, 0.0).double(), 1.0)
    own_BR = (1.0 - 2.0 * inputs.logprobs_BR.double().exp() + inputs.collisions_BR.double()).clamp(min=0.0)
    if inputs.weights_BR is not None:
        own_BR = own_BR * inputs.weights_BR.double().square()
    energy_BR = torch.where(inside_BR, own_BR, 0.0).cumsum(dim=1)

    _, group_B = torch.unique(inputs.group_B, return_inverse=True)
    place_BR = torch.arange(width, device=group_B.device).expand_as(inside_BR)
    key_M = (group_B.unsqueeze(1) * width + place_BR)[inside_BR]
    returns_M, energy_M = returns_BR[inside_BR], energy_BR[inside_BR]
    nothing_K = returns_M.new_zeros(len(group_B) * width)
    # Relative to the least return, so that equal returns have exactly themselves as the baseline.
    least_K = torch.full_like(nothing_K, torch.inf).scatter_reduce(0, key_M, returns_M, "amin")
    above_M = returns_M - least_K[key_M]
    has_energy_M = nothing_K.index_add(0, key_M, energy_M)[key_M] > 0
    weights_M = torch.where(has_energy_M, energy_M, 1.0)
    mean_K = nothing_K.index_add(0, key_M, above_M * weights_M) / nothing_K.index_add(0, key_M, weights_M)
    has_baseline_M = torch.ones_like(has_energy_M)
    if settings.options.otb_zero_tail:
        has_baseline_M = (place_BR < _longest_of_others(inputs.response_lengths_B, group_B).unsqueeze(1))[inside_BR]
    advantages_M = torch.where(has_baseline_M, above_M - mean_K[key_M], returns_M)
    return torch.zeros_like(inputs.rewards_BR).masked_scatter(inside_BR, advantages_M.to(inputs.rewards_BR.dtype)), None


def _longest_of_others(lengths_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return for each response the length of the longest other one of its group; 0 where there is none."""
    is_other_BB = group_B.unsqueeze(1) == group_B.unsqueeze(0)
    is_other_BB = is_other_BB & ~torch.eye(len(group_B), dtype=torch.bool, device=group_B.device)
    return torch.where(is_other_BB, lengths_B, 0).amax(dim=1)
