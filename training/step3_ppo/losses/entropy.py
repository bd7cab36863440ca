"""The entropy bonus. Pure tensors.

M response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def entropy_loss(entropies_M: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return loss_M = -coefficient x entropy of the policy, in nats, in the state that chooses each token.

    Williams and Peng 1991; the term S of PPO (Schulman et al. 2017, equation 9).
    """
    return -coefficient * entropies_M
