"""Advantage estimators, and the whitening of advantages over all ranks. Pure tensors.

B sequences, R response tokens, G groups.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from training.step3_ppo.advantages.inputs import (
    AdvantageInputs,
    AdvantageSettings,
    discounted_sums,
    group_centred,
    group_sizes,
    rewards_to_go,
    scaled,
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


def grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: (R - mean) / (std + 1e-6) over the group, the same on all tokens of a response.

    Shao et al. 2024 (DeepSeekMath), section 4.1.2, with outcome supervision; std has denominator n - 1, and is the
    group's or that of the outcomes of all ranks (`scaled`). Without one, R - mean: Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783). A group of one gets 0.
    """
    centred_B = group_centred(inputs.outcomes_B, inputs.group_B)
    return inputs.on_tokens(scaled(centred_B, inputs.outcomes_B, inputs, settings)), None


def rloo(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: R - mean of the others in the group, which is n / (n - 1) (R - mean of all n).

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740), section 3.1. A group of one gets 0. TRL's RLOO divides
    by the standard deviation of these advantages over the batch; divided by the group's (`scaled`) they are GRPO's,
    times a constant.
    """
    sizes_B = group_sizes(inputs.group_B)
    centred_B = group_centred(inputs.outcomes_B, inputs.group_B)
    advantages_B = centred_B * sizes_B / (sizes_B - 1).clamp(min=1)
    return inputs.on_tokens(scaled(advantages_B, advantages_B, inputs, settings, usual=None)), None


_EPSILON = 1e-8  # as TRL's and verl's masked_whiten
# Deviations below are those of rounding: of the KL in the reward where the policy still is its reference, say.
_LEAST_DEVIATION = 1e-6


def moments(advantages: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Return float64 [count, sum, sum of squares] of `advantages` where `inside`; add them over ranks."""
    taken = advantages[inside].double()
    count = torch.tensor(float(taken.numel()), dtype=torch.float64, device=taken.device)
    return torch.stack([count, taken.sum(), taken.square().sum()])


def whiten(advantages: torch.Tensor, inside: torch.Tensor, total_moments: torch.Tensor) -> torch.Tensor:
    """Return (advantages - mean) / std where `inside`, 0 elsewhere, with the moments of all ranks.

    A single token, or tokens that are all alike but for rounding, become 0.
    """
    count, total, squares = total_moments.tolist()
    mean = total / max(count, 1.0)
    variance = max(squares / max(count, 1.0) - mean * mean, 0.0) * count / max(count - 1.0, 1.0)
    white = (advantages - mean) / (variance + _EPSILON) ** 0.5
    differs = inside & (variance > _LEAST_DEVIATION**2)
    return torch.where(differs, white, torch.zeros_like(white))
