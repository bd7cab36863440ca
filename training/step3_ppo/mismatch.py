"""Differences between the rollout's log-probabilities and the training forward's: weights that correct them, and
figures. Pure tensors.

Responses are drawn from the rollout engine's policy and trained as if drawn from the trainer's. The two differ by
rounding, kernels or quantised weights; each token's loss is then weighted by p_train / p_rollout.

B sequences, R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MOST = 20.0  # bound of a log ratio, as verl's


@dataclass(frozen=True)
class MismatchSettings:
    """correction: "truncate" gives min(rho, threshold) (truncated importance sampling, Yao et al. 2025), "mask" gives
        rho from 1 / threshold to threshold and 0 outside (masked importance sampling); a masked token still counts in
        the loss's denominator.
    level: rho = exp(old - sampled) of a "token", or of the sum over a "sequence", shared by its tokens.
    """

    correction: str
    level: str
    threshold: float


def importance_weights(
    old_logprobs_BR: torch.Tensor,
    sampled_logprobs_BR: torch.Tensor,
    inside_BR: torch.Tensor,
    settings: MismatchSettings,
) -> torch.Tensor:
    """Return weights_BR, 0 outside the response. Exponents are held within +- 20."""
    log_ratio_BR = torch.where(inside_BR, old_logprobs_BR - sampled_logprobs_BR, 0.0)
    if settings.level == "sequence":
        log_ratio_BR = log_ratio_BR.sum(dim=1, keepdim=True).expand_as(log_ratio_BR)
    ratio_BR = torch.exp(log_ratio_BR.clamp(-_MOST, _MOST))
    if settings.correction == "truncate":
        weights_BR = ratio_BR.clamp(max=settings.threshold)
    else:
        trusted_BR = (ratio_BR >= 1.0 / settings.threshold) & (ratio_BR <= settings.threshold)
        weights_BR = torch.where(trusted_BR, ratio_BR, 0.0)
    return torch.where(inside_BR, weights_BR, 0.0)


def mismatch_sums(
    old_logprobs_BR: torch.Tensor, sampled_logprobs_BR: torch.Tensor, inside_BR: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return sums over this rank's responses, scalars to be added up over ranks and divided by tokens or sequences.

    Over tokens: `k1` and `k3`, estimates of KL(rollout || training) (Schulman 2020), and `absolute` differences.
    Over sequences: `perplexity_ratio`, training / rollout perplexity, exp of the mean difference of a response.
    """
    difference_BR = torch.where(inside_BR, old_logprobs_BR - sampled_logprobs_BR, 0.0)
    mean_B = difference_BR.sum(dim=1) / inside_BR.sum(dim=1)
    return {
        "k1": -difference_BR.sum(),
        "k3": (torch.exp(difference_BR.clamp(max=_MOST)) - difference_BR - 1.0).sum(),
        "absolute": difference_BR.abs().sum(),
        "perplexity_ratio": torch.exp((-mean_B).clamp(max=_MOST)).sum(),
    }


def clipped_tokens(
    old_logprobs_BR: torch.Tensor,
    sampled_logprobs_BR: torch.Tensor,
    inside_BR: torch.Tensor,
    settings: MismatchSettings,
) -> torch.Tensor:
    """Return the number, a scalar, of tokens whose ratio `importance_weights` truncates or masks."""
    unbounded = MismatchSettings("truncate", settings.level, float("inf"))
    free = importance_weights(old_logprobs_BR, sampled_logprobs_BR, inside_BR, unbounded)
    held = importance_weights(old_logprobs_BR, sampled_logprobs_BR, inside_BR, settings)
    return ((free != held) & inside_BR).sum()
