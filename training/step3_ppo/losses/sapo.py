"""Soft adaptive policy optimisation (SAPO). Pure tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens


def sapo(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -A 4 / tau sigmoid(tau (r - 1)), with r = exp(logp - old logp), tau that of the advantage's sign;
    nothing is clipped.

    Gao et al. 2025 (arXiv:2511.20347): a soft gate in place of PPO's clip. At r = 1 the gradient is
    -A, as PPO's, and it fades on both sides, faster for the larger tau. Its loss is the mean over responses of the mean
    over tokens (`seq-mean-token-mean`).
    """
    ratio_M = torch.exp(tokens.log_ratio_M)
    # In the ratio's dtype: torch.where of two numbers is of the default dtype, and both taus would be rounded to it.
    tau_M = torch.full_like(ratio_M, settings.sapo_tau_neg)
    tau_M = tau_M.masked_fill(tokens.advantages_M > 0, settings.sapo_tau_pos)
    gate_M = torch.sigmoid(tau_M * (ratio_M - 1.0)) * 4.0 / tau_M
    return -tokens.advantages_M * gate_M, torch.zeros_like(tau_M, dtype=torch.bool)
