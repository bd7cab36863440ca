"""The loss of the reward model. Pure: tensors in, tensors out.

Q pairs of responses to the same prompt, the first better than the second.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def ranking_loss(
    better_Q: torch.Tensor, worse_Q: torch.Tensor, weight_Q: torch.Tensor, prompts_in_step: float
) -> torch.Tensor:
    """Return this micro-batch's part of the step's loss, a scalar: -log sigmoid(better - worse), weighted.

    better_Q, worse_Q: float32 scores. weight_Q: each pair's share of its prompt; a prompt with K ranked responses
    has K(K-1)/2 pairs that share a weight of 1, so that prompts count alike (InstructGPT, Ouyang et al. 2022,
    equation 1). prompts_in_step: of the whole optimizer step, on all ranks.
    """
    return -(functional.logsigmoid(better_Q - worse_Q) * weight_Q).sum() / prompts_in_step
