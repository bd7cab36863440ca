"""The losses of PPO. Pure: tensors in, (loss, sums for metrics) out.

A loss is this micro-batch's part of the step's: a sum over its tokens divided by the response tokens of the whole
optimizer step on all ranks.

M response tokens of a micro-batch (may be 0).
"""

from __future__ import annotations

import torch


def policy_loss(
    logprobs_M: torch.Tensor,
    old_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    clip_range: float,
    tokens_in_step: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the clipped surrogate, -min(r A, clip(r, 1 - c, 1 + c) A), with r = exp(logp - old logp).

    Schulman et al. 2017 (PPO), equation 7. Sums for metrics: `clipped` tokens whose clip is in force, `ratio`,
    and `kl`, the k1 estimate of KL(old || new).
    """
    log_ratio_M = logprobs_M - old_logprobs_M
    ratio_M = torch.exp(log_ratio_M)
    free_M = -advantages_M * ratio_M
    held_M = -advantages_M * ratio_M.clamp(1.0 - clip_range, 1.0 + clip_range)
    loss = torch.maximum(free_M, held_M).sum() / tokens_in_step
    sums = {
        "clipped": float((held_M > free_M).sum()),
        "ratio": float(ratio_M.detach().sum()),
        "kl": float(-log_ratio_M.detach().sum()),
    }
    return loss, sums


def value_loss(
    values_M: torch.Tensor,
    old_values_M: torch.Tensor,
    returns_M: torch.Tensor,
    clip_range_value: float,
    tokens_in_step: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return 1/2 max((v - R)^2, (clip(v, old - c, old + c) - R)^2), the larger of the two errors.

    The clip of openai/baselines' ppo2, as DeepSpeed-Chat and TRL have it. Sums: `clipped` tokens.
    """
    # Clamped between bounds, so that a value inside them stays itself to the bit and does not count as clipped.
    held_M = torch.clamp(values_M, old_values_M - clip_range_value, old_values_M + clip_range_value)
    free_error_M = (values_M - returns_M).square()
    held_error_M = (held_M - returns_M).square()
    loss = 0.5 * torch.maximum(free_error_M, held_error_M).sum() / tokens_in_step
    return loss, {"clipped": float((held_error_M > free_error_M).sum())}


def pretraining_loss(logprobs_M: torch.Tensor, coefficient: float, tokens_in_step: float) -> torch.Tensor:
    """Return coefficient x the mean negative log-likelihood of unsupervised text.

    The gamma term of InstructGPT's PPO-ptx (Ouyang et al. 2022, equation 2). tokens_in_step counts text tokens.
    """
    return -coefficient * logprobs_M.sum() / tokens_in_step
