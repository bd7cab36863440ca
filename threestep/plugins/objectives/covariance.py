"""KL-Cov and Clip-Cov: tokens that cost a policy most of its entropy are held back. Pure tensors.

Entropy falls where log-probability and advantage go together (Cui et al. 2025, arXiv:2505.22617). Both methods select a
small share of the tokens of the whole optimizer step by that covariance. The paper computes it from the current
log-probabilities; here it is computed from the old ones, so that the selection is made before the step's first forward
and is the same for any split over micro-batches and ranks (the two are equal in the first update of a rollout).

M response tokens, r of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from training.step3_ppo.experience.sequences import TokenColumns
from training.step3_ppo.kl.estimators import smooth_absolute
from training.step3_ppo.losses.losses import ppo
from training.utils.base.seeds import derived_seed
from training.utils.contracts.documents import first_alike

if TYPE_CHECKING:
    from training.step3_ppo.experience.sequences import TrainingSequence
    from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens


def most_covariant(
    sequences: Sequence[TrainingSequence], settings: PolicyLossSettings, tokens: float, noise_seed: int
) -> Mapping[int, torch.Tensor]:
    """Return the tokens that KL-Cov selects (`PolicyLoss.selects`): those of the largest covariance."""
    return _selected(sequences, settings, tokens, lambda covariance_r, number: covariance_r)


def drawn_between(
    sequences: Sequence[TrainingSequence], settings: PolicyLossSettings, tokens: float, noise_seed: int
) -> Mapping[int, torch.Tensor]:
    """Return the tokens that Clip-Cov selects: drawn among those whose covariance is between its bounds. Each sequence
    has its own noise."""
    low, high = settings.options.clip_cov_low, settings.options.clip_cov_high

    def keys(covariance_r: torch.Tensor, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(derived_seed(noise_seed, number))
        noise_r = torch.rand(len(covariance_r), generator=generator, dtype=torch.float64).to(covariance_r.device)
        return torch.where((covariance_r > low) & (covariance_r < high), noise_r, float("-inf"))

    return _selected(sequences, settings, tokens, keys)


def _selected(
    sequences: Sequence[TrainingSequence],
    settings: PolicyLossSettings,
    tokens: float,
    keys: Callable[[torch.Tensor, int], torch.Tensor],
) -> Mapping[int, torch.Tensor]:
    """Select the tokens with the largest keys among those that count. keys: of (covariances of a sequence, its number).

    Sequences that are read alike are ranked by the old log-probabilities of the first of them: rounding, by which those
    of their forwards differ, would decide which of two equal tokens is selected.
    """
    first = first_alike([sequence.tokens for sequence in sequences])
    olds = [sequences[place].old_logprobs_r for place in first]
    sequences = [replace(sequence, old_logprobs_r=old_r) for sequence, old_r in zip(sequences, olds, strict=True)]
    device = sequences[0].advantages_r.device
    counted = TokenColumns([sequence for sequence in sequences if sequence.counts], device)
    assert counted.old_logprobs_M is not None  # they are read wherever tokens are selected
    sums = covariance_sums(counted.advantages_M, counted.old_logprobs_M)
    found = {}
    for sequence in sequences:
        assert sequence.old_logprobs_r is not None
        covariance_r = covariances(sequence.advantages_r, sequence.old_logprobs_r, sums)
        found[sequence.number] = keys(covariance_r, sequence.number)
    nothing = torch.empty(0, dtype=torch.float64, device=device)
    those = torch.cat([nothing, *(found[sequence.number] for sequence in sequences if sequence.counts)])
    bound = smallest_selected_key(those, tokens_to_select(settings.options.cov_share, tokens))
    return {number: key_r >= bound for number, key_r in found.items()}


def covariance_sums(advantages_M: torch.Tensor, old_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Return float64 [tokens, sum of advantages, sum of log-probabilities] of a whole step's tokens."""
    count = torch.ones_like(advantages_M, dtype=torch.float64).sum()
    return torch.stack([count, advantages_M.double().sum(), old_logprobs_M.double().sum()])


def covariances(advantages_M: torch.Tensor, old_logprobs_M: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return (A - mean A) (logp - mean logp), with the means of the step, as the paper defines it. float64."""
    count, advantages, logprobs = sums.unbind()
    count = count.clamp(min=1.0)
    return (advantages_M.double() - advantages / count) * (old_logprobs_M.double() - logprobs / count)


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
    penalty_M = settings.options.kl_cov_coef * smooth_absolute(log_ratio_M)
    loss_M = -tokens.advantages_M * torch.exp(log_ratio_M)
    return loss_M + torch.where(tokens.selected_M, penalty_M, 0.0), tokens.selected_M


def clip_cov(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's loss_M, 0 and without gradient on selected tokens."""
    if tokens.selected_M is None:
        raise AssertionError("Clip-Cov needs its selected tokens")
    loss_M, clipped_M = ppo(tokens, settings)
    return torch.where(tokens.selected_M, 0.0, loss_M), clipped_M | tokens.selected_M
