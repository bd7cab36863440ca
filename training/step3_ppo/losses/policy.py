"""Losses of the policy. Pure tensors.

M response tokens of a micro-batch (may be 0), whose sequences are whole.
"""

from __future__ import annotations

import torch

from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens, own_sequence_means


def ppo(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -min(r A, clip(r, 1 - low, 1 + high) A), with r = exp(logp - old logp), and where the clip
    applies.

    Schulman et al. 2017 (PPO), equation 7; a higher upper bound is DAPO's clip-higher (Yu et al. 2025, equation 10).
    With `dual_clip` c the loss is at most -c A where A < 0 (Ye et al. 2020, arXiv:1912.09729).
    """
    ratio_M = torch.exp(tokens.log_ratio_M)
    free_M = -tokens.advantages_M * ratio_M
    held_M = -tokens.advantages_M * ratio_M.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss_M = torch.maximum(free_M, held_M)
    clipped_M = held_M > free_M
    if settings.dual_clip is not None:
        most_M = -tokens.advantages_M * settings.dual_clip
        beyond_M = (tokens.advantages_M < 0) & (loss_M > most_M)
        loss_M = torch.where(beyond_M, most_M, loss_M)
        clipped_M = clipped_M | beyond_M
    return loss_M, clipped_M


_MOST_MEAN_LOG_RATIO = 10.0  # bound of a sequence's mean log ratio, as verl's


def gspo(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -min(s A, clip(s, 1 - low, 1 + high) A), where s is the ratio of a whole sequence to the power of
    one over its length: s = exp(mean over the response of (logp - old logp)).

    Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7, in the token form of its equation 14: s carries the token's
    gradient, so that the mean over a sequence (`seq-mean-token-mean`) is the paper's loss.
    """
    mean_M = own_sequence_means(tokens.log_ratio_M.detach(), tokens.sequence_M).clamp(max=_MOST_MEAN_LOG_RATIO)
    ratio_M = torch.exp(mean_M + tokens.logprobs_M - tokens.logprobs_M.detach())
    free_M = -tokens.advantages_M * ratio_M
    held_M = -tokens.advantages_M * ratio_M.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.maximum(free_M, held_M), held_M > free_M


def cispo(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -sg(clip(r, 1 - low, 1 + high)) A logp, with r = exp(logp - old logp) and sg without gradient.

    MiniMax 2025 (MiniMax-M1, arXiv:2506.13585), equations 4 and 5: the weight is clipped and every token keeps its
    gradient, where PPO's clip drops tokens.
    """
    ratio_M = torch.exp(tokens.log_ratio_M.detach())
    held_M = ratio_M.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return -held_M * tokens.advantages_M * tokens.logprobs_M, held_M != ratio_M
