"""Whitening of advantages by moments over all ranks. Pure tensors; the caller sums the moments."""

from __future__ import annotations

import torch

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
