"""Group sequence policy optimisation (GSPO). Pure tensors."""

from __future__ import annotations

import torch

from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens, own_sequence_means

_MOST = 10.0  # bound of a sequence's mean log ratio, as verl's


def gspo(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -min(s A, clip(s, 1 - low, 1 + high) A), where s is the ratio of a whole sequence to the power of
    one over its length: s = exp(mean over the response of (logp - old logp)).

    Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7, in the token form of its equation 14: s carries the token's
    gradient, so that the mean over a sequence (`seq-mean-token-mean`) is the paper's loss.
    """
    mean_M = own_sequence_means(tokens.log_ratio_M.detach(), tokens.sequence_M).clamp(max=_MOST)
    ratio_M = torch.exp(mean_M + tokens.logprobs_M - tokens.logprobs_M.detach())
    free_M = -tokens.advantages_M * ratio_M
    held_M = -tokens.advantages_M * ratio_M.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.maximum(free_M, held_M), held_M > free_M
