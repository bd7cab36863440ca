"""Geometric-mean policy optimisation (GMPO). Pure tensors."""

from __future__ import annotations

import torch

from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens, own_sequence_means


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
