"""Clipped importance sampling policy optimisation (CISPO). Pure tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens


def cispo(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -sg(clip(r, 1 - low, 1 + high)) A logp, with r = exp(logp - old logp) and sg without gradient.

    MiniMax 2025 (MiniMax-M1, arXiv:2506.13585), equations 4 and 5: the weight is clipped and every token keeps its
    gradient, where PPO's clip drops tokens.
    """
    ratio_M = torch.exp(tokens.log_ratio_M.detach())
    held_M = ratio_M.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return -held_M * tokens.advantages_M * tokens.logprobs_M, held_M != ratio_M
