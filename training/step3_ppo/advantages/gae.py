"""Generalised advantage estimation. Pure tensors."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, discounted_sums


def gae(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages_BR, returns_BR), 0 outside the response.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V, with V and A 0 after
    a response's last token, cut or ended (Schulman et al. 2016, equations 11 to 16).
    """
    if inputs.values_BR is None:
        raise AssertionError("gae needs the critic's values")
    values_BR = torch.where(inputs.inside_BR, inputs.values_BR, 0.0)
    rewards_BR = torch.where(inputs.inside_BR, inputs.rewards_BR, 0.0)
    next_values_BR = pad(values_BR[:, 1:], (0, 1))
    deltas_BR = rewards_BR + settings.gamma * next_values_BR - values_BR
    advantages_BR = discounted_sums(deltas_BR, settings.gamma * settings.lam)
    return advantages_BR, advantages_BR + values_BR
