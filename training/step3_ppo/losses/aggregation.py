"""From one loss per token to one number: each token's weight in the loss of the whole optimizer step. Pure tensors.

The loss of a step is the sum of weight x loss over the tokens of all its micro-batches on all ranks. Denominators count
the whole step, so the sum is the same for any split of the step. Tokens that do not count (those of responses
left out of the loss) have weight 0 and are in no denominator.

An aggregation is `fn(counted_M, sequence_M, totals) -> weights_M`. counted_M: float, 1 where a token counts, else 0.
sequence_M: int64, the token's sequence in the micro-batch.

M response tokens of a micro-batch (may be 0), whose sequences are whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.step3_ppo.losses.tokens import own_sequence_sums

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StepTotals:
    """Totals of one optimizer step over all ranks and micro-batches: tokens that count, and sequences with such tokens.
    longest_tokens: the limit of a response, `seq-mean-token-sum-norm`'s constant."""

    tokens: float
    sequences: float
    longest_tokens: float


def token_mean(counted_M: torch.Tensor, sequence_M: torch.Tensor, totals: StepTotals) -> torch.Tensor:
    """sum over all tokens / tokens: long responses weigh more (PPO; DAPO, Yu et al. 2025, equation 12)."""
    return counted_M / max(totals.tokens, 1.0)


def sequence_sum(counted_M: torch.Tensor, sequence_M: torch.Tensor, totals: StepTotals) -> torch.Tensor:
    """mean over sequences of the sum over their tokens (the policy gradient of a whole response)."""
    return counted_M / max(totals.sequences, 1.0)


def sequence_mean(counted_M: torch.Tensor, sequence_M: torch.Tensor, totals: StepTotals) -> torch.Tensor:
    """mean over sequences of the mean over their tokens (GRPO, Shao et al. 2024, equation 3)."""
    own_tokens_M = own_sequence_sums(counted_M, sequence_M).clamp(min=1.0)
    return counted_M / own_tokens_M / max(totals.sequences, 1.0)


def sequence_sum_norm(counted_M: torch.Tensor, sequence_M: torch.Tensor, totals: StepTotals) -> torch.Tensor:
    """mean over sequences of the sum over their tokens / the longest response there can be (Dr. GRPO, Liu et al.
    2025)."""
    return counted_M / totals.longest_tokens / max(totals.sequences, 1.0)
