"""One score of several rewards, by hand and against plain NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.rewards.arguments import COMBINATIONS, Combination, ScoringArguments
from training.utils.rewards.weighted import combined

SCORES = [[1.0, 3.0, math.nan], [2.0, 3.0, math.nan], [6.0, math.nan, math.nan]]  # K rewards of B responses


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sum", [9.0, 6.0, 0.0]),
        ("mean", [3.0, 3.0, 0.0]),
        ("minimum", [1.0, 3.0, 0.0]),
        # Of 1, 2, 6: deviation sqrt((4 + 1 + 9) / 3).
        ("mean_minus_deviations", [3.0 - 2.0 * math.sqrt(14 / 3), 3.0, 0.0]),
    ],
)
def test_by_hand(kind, expected):
    """What does not apply is no member; a response to which nothing applies scores 0."""
    scores_BK = torch.tensor(SCORES, dtype=torch.float64).T
    found_B = combined(scores_BK, ~scores_BK.isnan(), Combination(kind, 2.0))
    assert found_B.tolist() == pytest.approx(expected, abs=1e-12)


def test_against_numpy():
    values_BK = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    every, plain = torch.ones_like(values_BK, dtype=torch.bool), values_BK.numpy()
    reference = {"sum": plain.sum(1), "mean": plain.mean(1), "minimum": plain.min(1)}
    reference["mean_minus_deviations"] = plain.mean(1) - 0.7 * plain.std(1)
    for kind in COMBINATIONS:
        found = combined(values_BK, every, Combination(kind, 0.7)).numpy()
        np.testing.assert_allclose(found, reference[kind], rtol=0, atol=1e-12)


def test_deviations_are_of_one_kind():
    mistakes = Mistakes()
    ScoringArguments(reward_combine="mean", reward_deviations=2.0).validate(mistakes)
    with pytest.raises(ThreestepError, match="--reward_deviations 2 is for --reward_combine mean_minus_deviations"):
        mistakes.raise_if_any()
    mistakes = Mistakes()
    ScoringArguments(reward_combine="mean_minus_deviations", reward_deviations=2.0).validate(mistakes)
    mistakes.raise_if_any()
