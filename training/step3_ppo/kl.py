"""Estimators of the KL divergence from log-probabilities of drawn tokens. Pure tensors."""

from __future__ import annotations

import torch


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log p - log p_ref for each drawn token: unbiased for KL(p || p_ref), and negative at times.

    Schulman 2020, "Approximating KL divergence", estimator k1.
    """
    return logprobs - ref_logprobs
