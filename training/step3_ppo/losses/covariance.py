"""KL-Cov and Clip-Cov: tokens that cost a policy most of its entropy are held back. Pure tensors.

Entropy falls where log-probability and advantage go together (Cui et al. 2025, arXiv:2505.22617). Both methods select a
small share of the tokens of the whole optimizer step by that covariance. The paper computes it from the current
log-probabilities; here it is computed from the old ones, so that the selection is made before the step's first forward
and is the same for any split over micro-batches and ranks (the two are equal in the first update of a rollout).

M response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from training.step3_ppo.kl.estimators import smooth_absolute
from training.step3_ppo.losses.policy import ppo

if TYPE_CHECKING:
    from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens


def covariance_sums(advantages_M: torch.Tensor, old_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Return float64 [tokens, sum of advantages, sum of log-probabilities] of a whole step's tokens."""
    count = torch.ones_like(advantages_M, dtype=torch.float64).sum()
    return torch.stack([count, advantages_M.double().sum(), old_logprobs_M.double().sum()])


def covariances(advantages_M: torch.Tensor, old_logprobs_M: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return (A - mean A) (logp - mean logp), with the means of the step, as the paper defines it. float64."""
    count, advantages, logprobs = sums.unbind()
    count = count.clamp(min=1.0)
    return (advantages_M.double() - advantages / count) * (old_logprobs_M.double() - logprobs / count)


def kl_cov_keys(covariance_M: torch.Tensor, noise_M: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return the covariance, by which KL-Cov ranks tokens."""
    return covariance_M


def clip_cov_keys(covariance_M: torch.Tensor, noise_M: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return random keys, by which Clip-Cov ranks the tokens whose covariance is between low and high."""
    eligible_M = (covariance_M > low) & (covariance_M < high)
    return torch.where(eligible_M, noise_M.double(), float("-inf"))


def tokens_to_select(share: float, tokens_in_step: float) -> int:
    """Return how many tokens of a step to select: the share, but at least one."""
    return max(1, int(share * tokens_in_step))


def smallest_selected_key(keys_M: torch.Tensor, count: int) -> float:
    """Return the smallest of the `count` largest keys of a step, -inf left out: tokens from it up are selected, with
    all ties. inf, which selects none, where no key is left."""
    finite_m = keys_M[keys_M > float("-inf")]
    if not finite_m.numel():
        return float("inf")
    return float(torch.topk(finite_m, min(count, finite_m.numel())).values[-1])


def kl_cov(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -r A, and on selected tokens + kl_cov_coef |logp - old logp|, which is verl's estimate of the KL,
    whose gradient fades below 1e-3 nats: in the first update of a rollout the difference is rounding, and so its sign.
    Selected tokens count as clipped."""
    if tokens.selected_M is None:
        raise AssertionError("KL-Cov needs its selected tokens")
    log_ratio_M = tokens.log_ratio_M
    penalty_M = settings.kl_cov_coef * smooth_absolute(log_ratio_M)
    loss_M = -tokens.advantages_M * torch.exp(log_ratio_M)
    return loss_M + torch.where(tokens.selected_M, penalty_M, 0.0), tokens.selected_M


def clip_cov(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's loss_M, 0 and without gradient on selected tokens."""
    if tokens.selected_M is None:
        raise AssertionError("Clip-Cov needs its selected tokens")
    loss_M, clipped_M = ppo(tokens, settings)
    return torch.where(tokens.selected_M, 0.0, loss_M), clipped_M | tokens.selected_M
