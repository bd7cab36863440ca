"""Estimators from a response's own returns, and none. Pure tensors.

B sequences, R response tokens.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from training.step3_ppo.advantages.inputs import (
    AdvantageInputs,
    AdvantageSettings,
    discounted_sums,
    group_centred,
    rewards_to_go,
)


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


def reinforce_plus_plus(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR before whitening: G_t = r_t + gamma G_{t+1}.

    Hu et al. 2025 (arXiv:2501.03262); the caller whitens over the tokens of all ranks, which is the method's baseline.
    """
    return rewards_to_go(inputs, settings.gamma), None


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR before whitening: R - mean of the group, the same on all tokens of a response.

    The same paper's form for several samples a prompt; the caller whitens over the tokens of all ranks. A group of one
    gets 0.
    """
    return inputs.on_tokens(group_centred(inputs.outcomes_B, inputs.group_B)), None


def remax(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: G_t - the score of the greedy response to the same prompt, with G_t = r_t + G_{t+1}.

    Li et al. 2024 (arXiv:2310.10505). The baseline is the score alone, without KL.
    """
    if inputs.greedy_scores_B is None:
        raise AssertionError("remax needs the scores of greedy responses")
    return rewards_to_go(inputs, 1.0) - inputs.on_tokens(inputs.greedy_scores_B), None


def none(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR of 0: the policy's loss and its gradient are 0."""
    return torch.zeros_like(inputs.rewards_BR), None
