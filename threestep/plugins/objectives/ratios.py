"""Policy losses that need nothing but the tokens of a micro-batch. Pure tensors.

M response tokens of a micro-batch (may be 0), whose sequences are whole.
"""

from __future__ import annotations

import torch

from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens, own_sequence_means

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


def geo_mean(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -A exp(mean over the response of d), the same on all its tokens, and where the clip applies: d is
    logp - old logp, held below `high` where the advantage is positive and above -`low` where it is negative; A the mean
    of the response's advantages.

    Zhao et al. 2025 (arXiv:2507.20673): the geometric mean of a response's ratios in place of the arithmetic
    one, clipped token by token in log space. Its loss is the mean over responses (`seq-mean-token-mean`).
    """
    free_M = tokens.log_ratio_M
    held_M = torch.where(
        tokens.advantages_M > 0, free_M.clamp(max=settings.clip_high), free_M.clamp(min=-settings.clip_low)
    )
    ratio_M = torch.exp(own_sequence_means(held_M, tokens.sequence_M))
    return -own_sequence_means(tokens.advantages_M, tokens.sequence_M) * ratio_M, held_M != free_M


def sapo(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -A 4 / tau sigmoid(tau (r - 1)), with r = exp(logp - old logp), tau that of the advantage's sign;
    nothing is clipped.

    Gao et al. 2025 (arXiv:2511.20347): a soft gate in place of PPO's clip. At r = 1 the gradient is
    -A, as PPO's, and it fades on both sides, faster for the larger tau. Its loss is the mean over responses of the mean
    over tokens (`seq-mean-token-mean`).
    """
    ratio_M = torch.exp(tokens.log_ratio_M)
    # In the ratio's dtype: torch.where of two numbers is of the default dtype, and both taus would be rounded to it.
    tau_M = torch.full_like(ratio_M, settings.options.sapo_tau_neg)
    tau_M = tau_M.masked_fill(tokens.advantages_M > 0, settings.options.sapo_tau_pos)
    gate_M = torch.sigmoid(tau_M * (ratio_M - 1.0)) * 4.0 / tau_M
    return -tokens.advantages_M * gate_M, torch.zeros_like(tau_M, dtype=torch.bool)


def gpg(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -A logp; nothing is clipped.

    Williams 1992 (REINFORCE); the loss of GPG (Chu et al. 2025, arXiv:2504.02546). Correct if data are on-policy.
    """
    return -tokens.advantages_M * tokens.logprobs_M, torch.zeros_like(tokens.sequence_M, dtype=torch.bool)
