"""The losses of step 3: policy, critic and entropy, and the weight of each token in a step's loss. Pure tensors.

A policy loss is `fn(tokens, settings) -> (loss_M, clipped_M)`: the loss of each token before it is weighted, and a bool
that is True where a clip applies.

The loss of a step is the sum of weight x loss over the tokens of all its micro-batches on all ranks. Denominators count
the whole step, so the sum is the same for any split of the step. Tokens that do not count (those of responses
left out of the loss) have weight 0 and are in no denominator. An aggregation gives these weights:
`fn(counted_M, sequence_M, totals) -> weights_M`. counted_M: float, 1 where a token counts, else 0. sequence_M: int64,
the token's sequence in the micro-batch.

M response tokens of a micro-batch (may be 0), whose sequences are whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Bound of a log ratio, as verl's: exp(20) is 5e8, far outside any clip, and stays finite in float32.
_MOST = 20.0


@dataclass(frozen=True)
class PolicyTokens:
    """logprobs_M: float, of the trained policy, with a gradient. old_logprobs_M: of the policy that rolled out.
    advantages_M: float. sequence_M: int64, the token's sequence in the micro-batch.
    selected_M: bool, the tokens that the loss treats apart (`PolicyLoss.selects`); None for losses that select none.
    """

    logprobs_M: torch.Tensor
    old_logprobs_M: torch.Tensor
    advantages_M: torch.Tensor
    sequence_M: torch.Tensor
    selected_M: torch.Tensor | None = None

    @property
    def log_ratio_M(self) -> torch.Tensor:
        """logp - old logp, held within +- 20."""
        return (self.logprobs_M - self.old_logprobs_M).clamp(-_MOST, _MOST)


@dataclass(frozen=True)
class PolicyLossSettings:
    """clip_low, clip_high: the ratio is held from 1 - low to 1 + high. dual_clip: c > 1 of dual-clip PPO, or None.
    options: values of the loss's own flags."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    options: Any = None


def own_sequence_means(values_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean of `values_M` over its sequence."""
    return own_sequence_sums(values_M, sequence_M) / own_sequence_sums(torch.ones_like(values_M), sequence_M)


def own_sequence_sums(values_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum of `values_M` over its sequence."""
    count = int(sequence_M.max()) + 1 if sequence_M.numel() else 0
    return values_M.new_zeros(count).index_add(0, sequence_M, values_M)[sequence_M]


def ppo(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = -min(r A, clip(r, 1 - low, 1 + high) A), with r = exp(logp - old logp), and where the clip
    applies.

    Schulman et al. 2017 (PPO), equation 7; a higher upper bound is DAPO's clip-higher (Yu et al. 2025, equation 10).
    With `dual_clip` c the loss is at most -c A where A < 0 (Ye et al. 2020, arXiv:1912.09729).
    """
    ratio_M = torch.exp(tokens.log_ratio_M)
    free_M = -tokens.advantages_M * ratio_M
    held_M = -tokens.advantages_M * ratio_M.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss_M = torch.maximum(free_M, held_M)
    clipped_M = held_M > free_M
    if settings.dual_clip is not None:
        most_M = -tokens.advantages_M * settings.dual_clip
        beyond_M = (tokens.advantages_M < 0) & (loss_M > most_M)
        loss_M = torch.where(beyond_M, most_M, loss_M)
        clipped_M = clipped_M | beyond_M
    return loss_M, clipped_M


def value_loss(
    values_M: torch.Tensor, old_values_M: torch.Tensor, returns_M: torch.Tensor, clip_range_value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss_M = 1/2 max((v - R)^2, (clip(v, old - c, old + c) - R)^2), and where the clipped error is larger.

    The clip of openai/baselines' ppo2, as DeepSpeed-Chat and TRL have it.
    """
    # Clamped between bounds, so that a value inside them stays itself to the bit and does not count as clipped.
    held_M = torch.clamp(values_M, old_values_M - clip_range_value, old_values_M + clip_range_value)
    free_error_M = (values_M - returns_M).square()
    held_error_M = (held_M - returns_M).square()
    return 0.5 * torch.maximum(free_error_M, held_error_M), held_error_M > free_error_M


def entropy_loss(entropies_M: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return loss_M = -coefficient x entropy of the policy, in nats, in the state that chooses each token.

    Williams and Peng 1991; the term S of PPO (Schulman et al. 2017, equation 9).
    """
    return -coefficient * entropies_M


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
    """mean over sequences of the sum over their tokens / the longest possible response (Dr. GRPO, Liu et al. 2025)."""
    return counted_M / totals.longest_tokens / max(totals.sequences, 1.0)
