"""PPO's clipped surrogate, with separate bounds and a dual clip. Pure tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens


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
