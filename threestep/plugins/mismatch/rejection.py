"""Rejection of tokens by the distance between the two policies. Pure tensors.

d = log p_train - log p_rollout of a token, r = exp(d). Estimates of KL(rollout || train) from drawn tokens (Schulman
2020): k1 = -d, k2 = d^2 / 2, k3 = r - 1 - d. A scope takes a token's estimate, or the sum, mean or maximum over its
response, whose tokens are then accepted or rejected together.

k1 has two sides, and its bounds are on the ratio: r of a token; exp of the sum of d, the ratio of the whole response;
exp of the mean of d, the geometric mean; for the maximum, r of every token.

Worked, one response with r = 2, 1, 1/4, d = 0.693, 0, -1.386: sum of d = -0.693, so seq_sum_k1 sees 1/2 and
seq_mean_k1 0.5^(1/3) = 0.794. k2 = 0.240, 0, 0.961: sum 1.201, mean 0.400, maximum 0.961. k3 = 0.307, 0, 0.636: sum
0.943, mean 0.314.

M response tokens, whose sequences are whole; sequence_M: int64, a token's sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from training.step3_ppo.losses.losses import own_sequence_means, own_sequence_sums

if TYPE_CHECKING:
    from threestep.plugins.mismatch.settings import MismatchSettings, Rejection

_MOST = 20.0  # bound of d, as that of the weights


def kept_tokens(log_ratio_M: torch.Tensor, sequence_M: torch.Tensor, settings: MismatchSettings) -> torch.Tensor:
    """Return bool: tokens that every rejection and the veto accept. The veto drops responses with a token r < veto."""
    kept_M = torch.ones_like(log_ratio_M, dtype=torch.bool)
    for rejection in settings.rejection:
        kept_M = kept_M & kept_by(log_ratio_M, sequence_M, rejection)
    if settings.veto is not None:
        kept_M = kept_M & ~vetoed(log_ratio_M, sequence_M, settings.veto)
    return kept_M


def vetoed(log_ratio_M: torch.Tensor, sequence_M: torch.Tensor, veto: float) -> torch.Tensor:
    """Return bool: tokens of responses in which some r < veto."""
    return own_sequence_sums((torch.exp(log_ratio_M) < veto).long(), sequence_M) > 0


def kept_by(log_ratio_M: torch.Tensor, sequence_M: torch.Tensor, rejection: Rejection) -> torch.Tensor:
    """Return bool: tokens that one rejection accepts."""
    d_M = log_ratio_M.clamp(-_MOST, _MOST)
    if rejection.estimate == "k1":
        assert rejection.lower is not None  # `rejection_of` gives one
        if rejection.scope == "seq_max":
            return _every((d_M.exp() >= rejection.lower) & (d_M.exp() <= rejection.upper), sequence_M)
        ratio_M = _over(d_M, sequence_M, rejection.scope).exp()
        return (ratio_M >= rejection.lower) & (ratio_M <= rejection.upper)
    estimate_M = d_M.square() / 2 if rejection.estimate == "k2" else d_M.exp() - 1 - d_M
    if rejection.scope == "seq_max":
        return _every(estimate_M <= rejection.upper, sequence_M)
    return _over(estimate_M, sequence_M, rejection.scope) <= rejection.upper


def _over(values_M: torch.Tensor, sequence_M: torch.Tensor, scope: str) -> torch.Tensor:
    if scope == "token":
        return values_M
    return (own_sequence_sums if scope == "seq_sum" else own_sequence_means)(values_M, sequence_M)


def _every(holds_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor:
    """Return bool: whether it holds for all tokens of the response."""
    return own_sequence_sums((~holds_M).long(), sequence_M) == 0
