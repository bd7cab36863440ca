"""Generalised advantage estimation. Pure tensors.

B sequences, R response tokens.
"""

from __future__ import annotations

import torch

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings


def gae(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages_BR, returns_BR), 0 outside the response.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V, with V and A 0 after
    a response's last token, cut or ended (Schulman et al. 2016, equations 11 to 16).
    """
    if inputs.values_BR is None:
        raise AssertionError("gae needs the critic's values")
    gamma, lam = settings.gamma, settings.lam
    values_BR = torch.where(inputs.inside_BR, inputs.values_BR, 0.0)
    rewards_BR = torch.where(inputs.inside_BR, inputs.rewards_BR, 0.0)
    advantages_BR = torch.zeros_like(rewards_BR)
    next_value_B = torch.zeros_like(rewards_BR[:, 0])
    next_advantage_B = torch.zeros_like(next_value_B)
    for t in reversed(range(rewards_BR.shape[1])):
        delta_B = rewards_BR[:, t] + gamma * next_value_B - values_BR[:, t]
        next_advantage_B = delta_B + gamma * lam * next_advantage_B
        next_value_B = values_BR[:, t]
        advantages_BR[:, t] = next_advantage_B
    return advantages_BR, advantages_BR + values_BR
