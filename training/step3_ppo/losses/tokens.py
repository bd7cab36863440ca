"""Inputs of every policy loss. Pure tensors.

A policy loss is `fn(tokens, settings) -> (loss_M, clipped_M)`: the loss of each token before it is weighted
(`losses.aggregation`), and a bool that is True where a clip applies.

M response tokens of a micro-batch (may be 0), whose sequences are whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Bound of a log ratio, as verl's: exp(20) is 5e8, far outside any clip, and stays finite in float32.
_MOST = 20.0


@dataclass(frozen=True)
class PolicyTokens:
    """logprobs_M: float, of the trained policy, with a gradient. old_logprobs_M: of the policy that rolled out.
    advantages_M: float. sequence_M: int64, the token's sequence in the micro-batch.
    selected_M: bool, the tokens that the loss treats apart (`PolicyLoss.selects`); None for losses that select none.
    """

    logprobs_M: torch.Tensor
    old_logprobs_M: torch.Tensor
    advantages_M: torch.Tensor
    sequence_M: torch.Tensor
    selected_M: torch.Tensor | None = None

    @property
    def log_ratio_M(self) -> torch.Tensor:
        """logp - old logp, held within +- 20."""
        return (self.logprobs_M - self.old_logprobs_M).clamp(-_MOST, _MOST)


@dataclass(frozen=True)
class PolicyLossSettings:
    """clip_low, clip_high: the ratio is held from 1 - low to 1 + high. dual_clip: c > 1 of dual-clip PPO, or None.
    options: values of the loss's own flags."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    options: Any = None


def own_sequence_means(values_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean of `values_M` over its sequence."""
    return own_sequence_sums(values_M, sequence_M) / own_sequence_sums(torch.ones_like(values_M), sequence_M)


def own_sequence_sums(values_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum of `values_M` over its sequence."""
    count = int(sequence_M.max()) + 1 if sequence_M.numel() else 0
    return values_M.new_zeros(count).index_add(0, sequence_M, values_M)[sequence_M]
