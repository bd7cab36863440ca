"""Where the rollout's log-probabilities differ from the training forward's: weights that correct it, figures that
show it. Pure tensors.

Responses are drawn from the rollout engine's policy and trained as if from the trainer's. Rounding, kernels or
quantised weights set them apart; each token's loss is then weighted by p_train / p_rollout.

B sequences, R response tokens.
"""

from __future__ import annotations

import torch

_MOST = 20.0  # bound of a log ratio, as verl's
LEVELS = ("token", "sequence")
CORRECTIONS = ("truncate", "mask")


def importance_weights(
    old_logprobs_BR: torch.Tensor,
    sampled_logprobs_BR: torch.Tensor,
    inside_BR: torch.Tensor,
    correction: str,
    level: str,
    threshold: float,
) -> torch.Tensor:
    """Return weights_BR, 0 outside the response.

    rho = exp(old - sampled) of a token, or of the sum over the response ("sequence"), which all its tokens share;
    the exponent is held within +- 20.
    "truncate": min(rho, threshold) (truncated importance sampling, Yao et al. 2025). "mask": rho between 1 / threshold
    and threshold, 0 outside (masked importance sampling). A masked token still counts in the loss's denominator.
    """
    log_ratio_BR = torch.where(inside_BR, old_logprobs_BR - sampled_logprobs_BR, 0.0)
    if level == "sequence":
        log_ratio_BR = log_ratio_BR.sum(dim=1, keepdim=True).expand_as(log_ratio_BR)
    ratio_BR = torch.exp(log_ratio_BR.clamp(-_MOST, _MOST))
    if correction == "truncate":
        weights_BR = ratio_BR.clamp(max=threshold)
    else:
        kept_BR = (ratio_BR >= 1.0 / threshold) & (ratio_BR <= threshold)
        weights_BR = torch.where(kept_BR, ratio_BR, 0.0)
    return torch.where(inside_BR, weights_BR, 0.0)


def mismatch_sums(
    old_logprobs_BR: torch.Tensor, sampled_logprobs_BR: torch.Tensor, inside_BR: torch.Tensor
) -> dict[str, float]:
    """Return sums over this rank's responses, to be added up over ranks and divided by tokens or sequences.

    Over tokens: `k1` and `k3`, estimates of KL(rollout || training) (Schulman 2020), and `absolute` differences.
    Over sequences: `perplexity_ratio`, training / rollout perplexity, exp of the mean difference of a response.
    """
    difference_BR = torch.where(inside_BR, old_logprobs_BR - sampled_logprobs_BR, 0.0)
    mean_B = difference_BR.sum(dim=1) / inside_BR.sum(dim=1)
    return {
        "k1": float(-difference_BR.sum()),
        "k3": float((torch.exp(difference_BR.clamp(max=_MOST)) - difference_BR - 1.0).sum()),
        "absolute": float(difference_BR.abs().sum()),
        "perplexity_ratio": float(torch.exp((-mean_B).clamp(max=_MOST)).sum()),
    }


def clipped_tokens(
    old_logprobs_BR: torch.Tensor,
    sampled_logprobs_BR: torch.Tensor,
    inside_BR: torch.Tensor,
    correction: str,
    level: str,
    threshold: float,
) -> float:
    """Return how many tokens have a ratio that `importance_weights` truncates or masks."""
    free = importance_weights(old_logprobs_BR, sampled_logprobs_BR, inside_BR, "truncate", level, float("inf"))
    held = importance_weights(old_logprobs_BR, sampled_logprobs_BR, inside_BR, correction, level, threshold)
    return float((free != held)[inside_BR].sum())
