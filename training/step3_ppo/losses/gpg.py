"""The policy gradient itself, without ratio and clip. Pure tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens


def gpg(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -A logp; nothing is clipped.

    Williams 1992 (REINFORCE); the loss of GPG (Chu et al. 2025, arXiv:2504.02546). Correct if data are on-policy.
    """
    return -tokens.advantages_M * tokens.logprobs_M, torch.zeros_like(tokens.sequence_M, dtype=torch.bool)
