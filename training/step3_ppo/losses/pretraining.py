"""The pretraining loss that is mixed into PPO. Pure tensors.

M tokens of text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def pretraining_loss(logprobs_M: torch.Tensor, tokens_in_step: float) -> torch.Tensor:
    """Return this micro-batch's part of the mean negative log-likelihood of unsupervised text.

    The gamma term of InstructGPT's PPO-ptx before its coefficient (Ouyang et al. 2022, equation 2). tokens_in_step
    counts text tokens of the optimizer step on all ranks.
    """
    return -logprobs_M.sum() / tokens_in_step
