"""The losses of supervised fine-tuning. Pure: tensors in, tensors out.

M tokens that carry the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def sft_loss(logprobs_M: torch.Tensor, tokens_in_step: float) -> torch.Tensor:
    """Return this micro-batch's part of the step's mean negative log-likelihood, a scalar.

    logprobs_M: float32 log-probabilities of this micro-batch's target tokens (M may be 0).
    tokens_in_step: target tokens of the whole optimizer step, on all ranks; the parts add up to the mean.
    """
    return -logprobs_M.sum() / tokens_in_step
