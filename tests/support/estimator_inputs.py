"""Inputs of advantage estimators: a table worked by hand, and random ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings

HOW = AdvantageSettings(gamma=0.9, lam=0.7, norm_by_std=True)
WITHOUT_STD = AdvantageSettings(gamma=0.9, lam=0.7, norm_by_std=False)
ROOT3 = 3.0**0.5


def how_of(name: str, how: AdvantageSettings = HOW, **changed: bool) -> AdvantageSettings:
    """The settings with the estimator's own flags at their defaults, some of them changed."""
    own = ESTIMATORS[name].flags
    return replace(how, options=own and own(**changed))


def table_inputs() -> AdvantageInputs:
    """Two prompts. The first has responses of 1, 3 and 2 tokens whose rewards sum to 1, 4 and 1; the second has one
    of 2 tokens whose rewards are 0.5 and 2. What stands outside a response is not read."""
    nan = float("nan")
    return AdvantageInputs(
        rewards_BR=torch.tensor([[1.0, nan, 9.0], [0.0, 1.0, 3.0], [-1.0, 2.0, nan], [0.5, 2.0, 9.0]]),
        response_lengths_B=torch.tensor([1, 3, 2, 2]),
        group_B=torch.tensor([7, 7, 7, 3]),
        values_BR=torch.zeros(4, 3),
        greedy_scores_B=torch.tensor([2.0, 2.0, 2.0, 1.0]),
        logprobs_BR=torch.tensor([[0.5, nan, nan], [0.5, 0.5, 0.25], [0.25, 0.5, nan], [0.5, 0.5, nan]]).log(),
        collisions_BR=torch.tensor([[0.5, nan, nan], [0.5, 0.5, 0.5], [0.5, 0.5, nan], [0.5, 0.5, nan]]),
    )


def random_inputs(lengths_of_groups: list[list[int]], seed: int, extra_columns: int = 0) -> AdvantageInputs:
    """float64, groups numbered from 10 down; one group of two or more has equal outcomes where the seed is even."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [length for group in lengths_of_groups for length in group]
    rewards_BR = torch.randn(len(lengths), 6, generator=generator, dtype=torch.float64)
    values_BR = torch.randn(len(lengths), 6, generator=generator, dtype=torch.float64)
    group_B = torch.tensor([10 - g for g, group in enumerate(lengths_of_groups) for _ in group])
    if seed % 2 == 0:
        rewards_BR[group_B == 10] = 0.0
        rewards_BR[group_B == 10, 0] = 1.3
    greedy = torch.randn(len(lengths_of_groups), generator=generator, dtype=torch.float64)
    probabilities_BRV = torch.rand(len(lengths), 6, 5, generator=generator, dtype=torch.float64).softmax(-1)
    chosen_BR = probabilities_BRV[..., 0]
    junk_BR = torch.full((len(lengths), extra_columns), float("nan"), dtype=torch.float64)
    return AdvantageInputs(
        rewards_BR=torch.cat([rewards_BR, junk_BR], dim=1),
        response_lengths_B=torch.tensor(lengths),
        group_B=group_B,
        values_BR=torch.cat([values_BR, junk_BR], dim=1),
        greedy_scores_B=greedy[10 - group_B],
        logprobs_BR=torch.cat([chosen_BR.log(), junk_BR], dim=1),
        collisions_BR=torch.cat([probabilities_BRV.square().sum(-1), junk_BR], dim=1),
    )


def reordered(inputs: AdvantageInputs, order: torch.Tensor) -> AdvantageInputs:
    return AdvantageInputs(
        inputs.rewards_BR[order],
        inputs.response_lengths_B[order],
        inputs.group_B[order],
        inputs.values_BR[order],
        inputs.greedy_scores_B[order],
        inputs.logprobs_BR[order],
        inputs.collisions_BR[order],
        over_ranks=inputs.over_ranks,
    )


def vars_of(inputs: AdvantageInputs) -> dict:
    names = ("rewards_BR", "response_lengths_B", "group_B", "values_BR", "greedy_scores_B", "logprobs_BR")
    names = (*names, "collisions_BR")
    return {name: getattr(inputs, name) for name in names}


def spread(value: Callable) -> Callable:
    return lambda r, R, L, i, **more: [value(R, L, i, **more)] * len(r)  # noqa: N803


def check_formula(name: str, formula: Callable, inputs: AdvantageInputs) -> None:
    """An estimator beside its written formula. r: rewards of the response, R: outcomes of its whole group with its own
    at index i, L: their lengths."""
    got_BR, _ = ESTIMATORS[name].estimate(inputs, how_of(name))
    lengths = inputs.response_lengths_B.tolist()
    rewards = [row[:length] for row, length in zip(inputs.rewards_BR.tolist(), lengths, strict=True)]
    outcomes = [sum(row) for row in rewards]
    members = [[j for j, g in enumerate(inputs.group_B) if g == group] for group in inputs.group_B]
    teaching = sum(len({outcomes[j] for j in own}) > 1 for own in members)
    for b, own in enumerate(members):
        want = formula(
            rewards[b],
            [outcomes[j] for j in own],
            [lengths[j] for j in own],
            own.index(b),
            greedy=float(inputs.greedy_scores_B[b]),
            alpha=len(lengths) / max(teaching, 1),
        )
        assert got_BR[b].tolist() == pytest.approx(want + [0.0] * (6 - lengths[b]), rel=1e-8, abs=1e-8)
