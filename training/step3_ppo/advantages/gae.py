"""Generalised advantage estimation. Pure tensors.

B sequences, R response tokens.
"""

from __future__ import annotations

import torch


def gae(
    rewards_BR: torch.Tensor, values_BR: torch.Tensor, response_lengths_B: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages_BR, returns_BR), 0 outside the response.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V, with V and A 0 after
    a response's last token, cut or ended (Schulman et al. 2016, equations 11 to 16).
    """
    columns_R = torch.arange(rewards_BR.shape[1], device=rewards_BR.device)
    inside_BR = columns_R < response_lengths_B.unsqueeze(1)
    values_BR = torch.where(inside_BR, values_BR, torch.zeros_like(values_BR))
    rewards_BR = torch.where(inside_BR, rewards_BR, torch.zeros_like(rewards_BR))
    advantages_BR = torch.zeros_like(rewards_BR)
    next_value_B = torch.zeros_like(rewards_BR[:, 0])
    next_advantage_B = torch.zeros_like(next_value_B)
    for t in reversed(range(rewards_BR.shape[1])):
        delta_B = rewards_BR[:, t] + gamma * next_value_B - values_BR[:, t]
        next_advantage_B = delta_B + gamma * lam * next_advantage_B
        next_value_B = values_BR[:, t]
        advantages_BR[:, t] = next_advantage_B
    return advantages_BR, advantages_BR + values_BR
