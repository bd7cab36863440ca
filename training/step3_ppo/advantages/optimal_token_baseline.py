"""The optimal token baseline (OTB), a baseline for each place in a response, and its form for responses into which
tokens are inserted. Pure tensors.

B sequences, R response tokens, K pairs of a group and a place.
"""

from __future__ import annotations

import torch

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, discounted_sums


def optimal_token_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: G_t - B_t on drawn tokens, with G_t = r_t + G_{t+1}, over the group's responses that have a
    drawn token at t:

    B_t = sum(G_t W_t) / sum(W_t),  W_t = w_1 + ... + w_t,  w_j = 1 - 2 p_j + sum over the vocabulary of p^2

    Li et al. 2026 (arXiv:2602.07078): the baseline of least variance, if the square of a token's gradient is that of
    the gradient by its logits, w_j. p is the policy that rolled out; with weights against a mismatch w_j is multiplied
    by the square of its token's weight. Where all W_t are 0 (one token has all probability), B_t is the plain mean.

    Tokens of the longest response beyond the end of all others are compared with nothing: with `zero_tail` B_t is 0
    there and the token learns from its return, without it B_t is that return and the token learns nothing. A group of
    one is all tail.
    """
    columns_R = torch.arange(inputs.rewards_BR.shape[1], device=inputs.rewards_BR.device)
    return _above_baseline(inputs, settings, columns_R.expand_as(inputs.rewards_BR)), None


def tir_optimal_token_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return the same where t counts drawn tokens alone: responses of tool-integrated reasoning, whose inserted
    observations have any length, are compared after equally many drawn tokens. Without insertions both agree."""
    return _above_baseline(inputs, settings, inputs.all_drawn_BR.cumsum(dim=1) - 1), None


def _above_baseline(inputs: AdvantageInputs, settings: AdvantageSettings, place_BR: torch.Tensor) -> torch.Tensor:
    """place_BR: int64, where drawn tokens of a group are compared, from 0 up along the response."""
    if inputs.logprobs_BR is None or inputs.collisions_BR is None:
        raise AssertionError("the optimal token baseline needs the policy's probabilities")
    drawn_BR, width = inputs.all_drawn_BR, inputs.rewards_BR.shape[1]
    returns_BR = discounted_sums(torch.where(drawn_BR, inputs.rewards_BR, 0.0).double(), 1.0)
    own_BR = (1.0 - 2.0 * inputs.logprobs_BR.double().exp() + inputs.collisions_BR.double()).clamp(min=0.0)
    if inputs.weights_BR is not None:
        own_BR = own_BR * inputs.weights_BR.double().square()
    energy_BR = torch.where(drawn_BR, own_BR, 0.0).cumsum(dim=1)

    _, group_B = torch.unique(inputs.group_B, return_inverse=True)
    key_M = (group_B.unsqueeze(1) * width + place_BR)[drawn_BR]
    returns_M, energy_M = returns_BR[drawn_BR], energy_BR[drawn_BR]
    nothing_K = returns_M.new_zeros(len(group_B) * width)
    # Relative to the least return, so that equal returns have exactly themselves as the baseline.
    least_K = torch.full_like(nothing_K, torch.inf).scatter_reduce(0, key_M, returns_M, "amin")
    above_M = returns_M - least_K[key_M]
    has_energy_M = nothing_K.index_add(0, key_M, energy_M)[key_M] > 0
    weights_M = torch.where(has_energy_M, energy_M, 1.0)
    mean_K = nothing_K.index_add(0, key_M, above_M * weights_M) / nothing_K.index_add(0, key_M, weights_M)
    has_baseline_M = torch.ones_like(has_energy_M)
    if settings.zero_tail:
        has_baseline_M = place_BR[drawn_BR] <= _last_of_others(place_BR, drawn_BR, group_B)[drawn_BR]
    advantages_M = torch.where(has_baseline_M, above_M - mean_K[key_M], returns_M)
    return torch.zeros_like(inputs.rewards_BR).masked_scatter(drawn_BR, advantages_M.to(inputs.rewards_BR.dtype))


def _last_of_others(place_BR: torch.Tensor, drawn_BR: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return [B, R] the last place of any other response of the group; -1 where there is none."""
    last_B = torch.where(drawn_BR, place_BR, -1).amax(dim=1)
    is_other_BB = group_B.unsqueeze(1) == group_B.unsqueeze(0)
    is_other_BB = is_other_BB & ~torch.eye(len(group_B), dtype=torch.bool, device=group_B.device)
    return torch.where(is_other_BB, last_B, -1).amax(dim=1, keepdim=True).expand_as(place_BR)
