"""Importance weights of tokens. Pure tensors.

M response tokens, whose sequences are whole; sequence_M: int64, a token's sequence; log_ratio_M: log p_train -
log p_rollout of each. B sequences, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from threestep.plugins.mismatch.rejection import kept_tokens
from training.step3_ppo.contracts.records import Corrected
from training.step3_ppo.losses.losses import own_sequence_means, own_sequence_sums

if TYPE_CHECKING:
    from threestep.plugins.mismatch.settings import MismatchSettings
    from training.utils.contracts.rollout import DrawnTokens

MOST = 20.0  # bound of a log ratio, as verl's: exp(20) is 5e8, and its square is finite in float64


def ratios(log_ratio_M: torch.Tensor, sequence_M: torch.Tensor, level: str) -> torch.Tensor:
    """Return rho_M: r of a "token"; the product of r over a "sequence"; its "geometric" mean, the product to the power
    of 1 / tokens. Those of a response are the same for all its tokens. Exponents are held within +- 20."""
    if level == "sequence":
        log_ratio_M = own_sequence_sums(log_ratio_M, sequence_M)
    elif level == "geometric":
        log_ratio_M = own_sequence_means(log_ratio_M, sequence_M)
    return torch.exp(log_ratio_M.clamp(-MOST, MOST))


def importance_weights(log_ratio_M: torch.Tensor, sequence_M: torch.Tensor, settings: MismatchSettings) -> torch.Tensor:
    """Return weights_M of `correction`, before they are normalised:

    none: 1.
    truncate: min(rho, threshold) (truncated importance sampling, Yao et al. 2025), and at least threshold_lower where
        one is given.
    mask: rho from threshold_lower to threshold and 0 outside (masked importance sampling; IcePop, Ling team 2025).
    """
    if settings.correction == "none":
        return torch.ones_like(log_ratio_M)
    rho_M = ratios(log_ratio_M, sequence_M, settings.level)
    if settings.correction == "truncate":
        return rho_M.clamp(min=settings.threshold_lower, max=settings.threshold)
    return torch.where((rho_M >= settings.least) & (rho_M <= settings.threshold), rho_M, 0.0)


def loss_weights(log_ratio_M: torch.Tensor, sequence_M: torch.Tensor, settings: MismatchSettings) -> torch.Tensor:
    """Return the weights of a bypass, of a micro-batch whose log_ratio_M is log p of the policy being trained -
    log p_rollout: 0 where rejected. Nothing is normalised, and rejected tokens stay in the denominators."""
    weights_M = importance_weights(log_ratio_M, sequence_M, settings)
    return torch.where(kept_tokens(log_ratio_M, sequence_M, settings), weights_M, 0.0)


def weight_sums(weights_M: torch.Tensor, sequence_M: torch.Tensor, counted_M: torch.Tensor, level: str) -> torch.Tensor:
    """Return float64 [2]: the sum of the weights over tokens that count, or, above the level of tokens, over sequences
    with such tokens; and how many these are. Added up over ranks, their quotient is the mean."""
    share_M = counted_M.double()
    if level != "token":
        share_M = share_M / own_sequence_sums(share_M, sequence_M).clamp(min=1.0)
    return torch.stack([(weights_M * share_M).sum(), share_M.sum()])


def corrected(
    old_logprobs_BR: torch.Tensor,
    drawn: DrawnTokens,
    counts_B: torch.Tensor,
    settings: MismatchSettings,
    *,
    over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> Corrected:
    """Weigh and reject the tokens of a rollout. over_ranks: the sum of a tensor over all ranks, to normalise.

    Normalised weights are divided by their mean over all ranks' tokens (responses, above the level of tokens), those
    of responses that do not count (counts_B) and what is rejected apart: first the bounds, then the mean, then the
    rejection.
    """
    log_ratio_M = (old_logprobs_BR - drawn.logprobs_BR)[drawn.mask_BR]
    sequence_M = sequences_of(drawn.mask_BR)
    weights_M = importance_weights(log_ratio_M, sequence_M, settings)
    if settings.normalize:
        total, count = over_ranks(weight_sums(weights_M, sequence_M, counts_B[sequence_M], settings.level))
        weights_M = weights_M * (count / total if total > 0 else torch.ones_like(total)).to(weights_M.dtype)
    kept_M = kept_tokens(log_ratio_M, sequence_M, settings)
    outside_BR = torch.zeros_like(old_logprobs_BR)
    weights_BR = outside_BR.masked_scatter(drawn.mask_BR, torch.where(kept_M, weights_M, 0.0))
    if settings.rejected == "stay" or not settings.rejects:
        return Corrected(weights_BR)
    return Corrected(weights_BR, outside_BR.bool().masked_scatter(drawn.mask_BR, kept_M))


def sequences_of(inside_BR: torch.Tensor) -> torch.Tensor:
    """Return sequence_M of the tokens `inside_BR`, row by row."""
    rows = torch.arange(len(inside_BR), device=inside_BR.device)
    return rows.unsqueeze(1).expand(inside_BR.shape)[inside_BR]
