"""The z-loss. Pure: tensors in, tensors out. M tokens that carry the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def z_loss(log_normalizers_M: torch.Tensor, tokens_in_step: float) -> torch.Tensor:
    """Return this micro-batch's part of the step's mean of log^2 Z, a scalar: it keeps the logits from drifting.

    log_normalizers_M: float32, log Z, the log of the sum of the exponentiated logits that predict each target.
    tokens_in_step: target tokens of the whole optimizer step, on all ranks; the parts add up to the mean. PaLM adds it
        with a weight of 1e-4 (Chowdhery et al. 2022, section 5).
    """
    return log_normalizers_M.square().sum() / tokens_in_step
