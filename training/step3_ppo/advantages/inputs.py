"""Rewards of tokens, the inputs that estimators get with them, and functions that estimators share. Pure tensors.

An estimator is `fn(inputs, settings) -> (advantages_BR, returns_BR)`: both 0 outside the response; returns are None if
no critic learns from them.

B sequences, R response tokens, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


def shaped_rewards(
    scores_B: torch.Tensor,
    kl_BR: torch.Tensor,
    response_lengths_B: torch.Tensor,
    kl_coef: float,
    *,
    turns_BR: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rewards_BR: the score on each response's last real token, minus kl_coef x KL on every token.

    scores_B: float32. kl_BR: float32, read inside the response only. response_lengths_B: int64 >= 1. turns_BR: float32,
        the part of the score that turns of a conversation have earned, each at its last token; None: no part.
    Stiennon et al. 2020, section 3.4; InstructGPT (Ouyang et al. 2022), equation 2.
    """
    columns_R = torch.arange(kl_BR.shape[1], device=kl_BR.device)
    inside_BR = columns_R < response_lengths_B.unsqueeze(1)
    rewards_BR = torch.where(inside_BR, -kl_coef * kl_BR, torch.zeros_like(kl_BR))
    if turns_BR is not None:
        scores_B = scores_B - turns_BR.sum(dim=1)
        rewards_BR = rewards_BR + turns_BR
    at_end_BR = columns_R == (response_lengths_B - 1).unsqueeze(1)
    return rewards_BR + torch.where(at_end_BR, scores_B.unsqueeze(1), torch.zeros_like(kl_BR))


def missing_eos_punishment(ended_B: torch.Tensor, penalty: float) -> torch.Tensor:
    """Return float32 [B], -penalty where a response did not end by itself, else 0.

    ended_B: bool. Stiennon et al. 2020 give such responses a fixed low score; TRL subtracts, as here.
    """
    return -penalty * (~ended_B).float()


def overlong_punishment(response_lengths_B: torch.Tensor, max_tokens: int, buffer_tokens: int) -> torch.Tensor:
    """Return float32 [B]: 0 up to max - buffer tokens, from there on a straight line down to -1 at max tokens.

    buffer_tokens 0 punishes nothing. The soft over-long punishment of DAPO (Yu et al. 2025, equation 13).
    """
    if buffer_tokens == 0:
        return torch.zeros(response_lengths_B.shape, device=response_lengths_B.device)
    free_tokens = max_tokens - buffer_tokens
    return ((free_tokens - response_lengths_B).float() / buffer_tokens).clamp(-1.0, 0.0)


# Outcomes that differ by no more than this share of the larger one (of 1, if both are smaller) count as equal. Divided
# by a group's deviation that is rounding, they would have advantages as large as any other. A float32 model's scores of
# one text in packed and in padded rows differ by at most 4e-6 of them (720 scores of Llama, GPT-2, OPT, random
# weights).
ALIKE = 1e-5


@dataclass(frozen=True)
class AdvantageInputs:
    """The sequences of one rank, of drawn tokens alone. A group, the samples of one prompt, is whole on its rank.

    rewards_BR: float, one per token, read inside the response only.   response_lengths_B: int64 >= 1.
    group_B: int64, equal for the members of a group; any order.       values_BR: float, of the critic, or None.
    greedy_scores_B: float, the score of the greedy response to each sequence's prompt, or None.
    logprobs_BR, collisions_BR: float, of the policy that rolled out, by the training forward: log p of the token, and
        the sum of p^2 over the vocabulary; None if the estimator does not read them.
    weights_BR: float, of the correction of the rollout (`contracts.records`), or None.
    over_ranks: sums a tensor over all ranks.
    """

    rewards_BR: torch.Tensor
    response_lengths_B: torch.Tensor
    group_B: torch.Tensor
    values_BR: torch.Tensor | None = None
    greedy_scores_B: torch.Tensor | None = None
    logprobs_BR: torch.Tensor | None = None
    collisions_BR: torch.Tensor | None = None
    weights_BR: torch.Tensor | None = None
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda own: own

    @cached_property
    def inside_BR(self) -> torch.Tensor:
        """bool, True on response tokens."""
        columns_R = torch.arange(self.rewards_BR.shape[1], device=self.rewards_BR.device)
        return columns_R < self.response_lengths_B.unsqueeze(1)

    @cached_property
    def outcomes_B(self) -> torch.Tensor:
        """float64, the sum of each response's rewards; the same number for a group whose sums are all `alike`, which
        then has advantages of exactly 0."""
        return settled(torch.where(self.inside_BR, self.rewards_BR, 0.0).double().sum(dim=1), self.group_B)

    def on_tokens(self, advantages_B: torch.Tensor) -> torch.Tensor:
        """Return [B, R], each sequence's number on all its tokens."""
        spread_BR = advantages_B.to(self.rewards_BR.dtype).unsqueeze(1).expand_as(self.rewards_BR)
        return torch.where(self.inside_BR, spread_BR, 0.0)


@dataclass(frozen=True)
class AdvantageSettings:
    """gamma: discount. lam: GAE's lambda. norm_by_std: divide by a standard deviation. norm_over: whose, `group` or
    `batch`; None is the estimator's default. options: values of the estimator's own flags."""

    gamma: float
    lam: float
    norm_by_std: bool
    norm_over: str | None = None
    options: Any = None


def group_sums(values_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return for each sequence the sum of `values_B` over its group."""
    _, place_B = torch.unique(group_B, return_inverse=True)
    sums_G = torch.zeros_like(values_B).index_add_(0, place_B, values_B)  # at most B groups
    return sums_G[place_B]


def group_sizes(group_B: torch.Tensor) -> torch.Tensor:
    """Return for each sequence the size of its group, int64."""
    return group_sums(torch.ones_like(group_B), group_B)


def group_centred(values_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return value - mean of its group: exactly 0 where all of a group are equal, and in a group of one."""
    above_B = values_B - _of_group(values_B, group_B, "amin")  # 0, whose mean no sum has rounded, where all are equal
    return above_B - group_sums(above_B, group_B) / group_sizes(group_B)


def group_std(values_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return for each sequence its group's standard deviation, with denominator n - 1; 0 in a group of one."""
    squares_B = group_sums(group_centred(values_B, group_B).square(), group_B)
    return (squares_B / (group_sizes(group_B) - 1).clamp(min=1)).sqrt()


def settled(values_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return the values; the largest for all of a group whose values are all `alike`."""
    low_B, high_B = (_of_group(values_B, group_B, reduction) for reduction in ("amin", "amax"))
    return torch.where(alike(low_B, high_B), high_B, values_B)


def alike(some_B: torch.Tensor, others_B: torch.Tensor) -> torch.Tensor:
    """Return bool [B], whether two outcomes count as equal: they differ by at most ALIKE of the larger one."""
    return (some_B - others_B).abs() <= ALIKE * torch.maximum(some_B.abs(), others_B.abs()).clamp(min=1.0)


def _of_group(values_B: torch.Tensor, group_B: torch.Tensor, reduction: str) -> torch.Tensor:
    _, place_B = torch.unique(group_B, return_inverse=True)
    # At most B groups.
    found_G = torch.zeros_like(values_B).scatter_reduce(0, place_B, values_B, reduction, include_self=False)
    return found_G[place_B]


def rewards_to_go(inputs: AdvantageInputs, gamma: float) -> torch.Tensor:
    """Return G_t = r_t + gamma G_{t+1} on each response token, 0 outside."""
    return discounted_sums(torch.where(inputs.inside_BR, inputs.rewards_BR, 0.0), gamma)


def discounted_sums(values_BR: torch.Tensor, discount: float) -> torch.Tensor:
    """Return S_t = v_t + discount S_{t+1}, where S is 0 after the last column."""
    result_BR = torch.zeros_like(values_BR)
    following_B = torch.zeros_like(values_BR[:, 0])
    for t in reversed(range(values_BR.shape[1])):
        following_B = values_BR[:, t] + discount * following_B
        result_BR[:, t] = following_B
    return result_BR


EPSILON = 1e-6  # as verl's; keeps groups of nearly equal outcomes finite


def scaled(
    advantages_B: torch.Tensor,
    values_B: torch.Tensor,
    inputs: AdvantageInputs,
    settings: AdvantageSettings,
    *,
    usual: str | None = "group",
) -> torch.Tensor:
    """Return advantages / (the standard deviation of `values_B` + 1e-6), with denominator n - 1.

    settings.norm_over, `usual` where that is None: `group`, the sequence's group (Shao et al. 2024); `batch`, the
        sequences of all ranks, which weighs a prompt by how much its outcomes differ (Liu et al. 2025,
        arXiv:2508.08221). With neither, and without `norm_by_std`, advantages stay as they are.
    """
    over = settings.norm_over or usual
    if over is None or not settings.norm_by_std:
        return advantages_B
    if over == "group":
        return advantages_B / (group_std(values_B, inputs.group_B) + EPSILON)
    count = torch.ones_like(values_B).sum()
    count, total, squares = inputs.over_ranks(torch.stack([count, values_B.sum(), values_B.square().sum()])).unbind()
    variance = (squares - total.square() / count) / (count - 1.0).clamp(min=1.0)
    return advantages_B / (variance.clamp(min=0.0).sqrt() + EPSILON)
