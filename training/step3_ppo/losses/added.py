"""The losses beside the policy's: the critic's and the entropy bonus. Pure tensors.

M response tokens.
"""

from __future__ import annotations

import torch


def value_loss(
    values_M: torch.Tensor, old_values_M: torch.Tensor, returns_M: torch.Tensor, clip_range_value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = 1/2 max((v - R)^2, (clip(v, old - c, old + c) - R)^2), and where the clipped error is larger.

    The clip of openai/baselines' ppo2, as DeepSpeed-Chat and TRL have it.
    """
    # Clamped between bounds, so that a value inside them stays itself to the bit and does not count as clipped.
    held_M = torch.clamp(values_M, old_values_M - clip_range_value, old_values_M + clip_range_value)
    free_error_M = (values_M - returns_M).square()
    held_error_M = (held_M - returns_M).square()
    return 0.5 * torch.maximum(free_error_M, held_error_M), held_error_M > free_error_M


def entropy_loss(entropies_M: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return loss_M = -coefficient x entropy of the policy, in nats, in the state that chooses each token.

    Williams and Peng 1991; the term S of PPO (Schulman et al. 2017, equation 9).
    """
    return -coefficient * entropies_M
