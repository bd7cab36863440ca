"""Equality with the ground truth."""

from __future__ import annotations

import math

import pytest

from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.rules.exact_match import exact_match_reward
from training.utils.rewards.table import RULES


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        (" apple fig\n", "apple fig", 1.0),
        ("apple  fig", "apple fig", 0.0),
        ("Apple fig", "apple fig", 0.0),
        ("18", 18, 1.0),
        ("b", ["a", "b"], 1.0),
        ("c", ["a", "b"], 0.0),
        ("4", 4.0, 1.0),
        ("4.0", 4, 1.0),
        ("4.0", 4.0, 1.0),
        ("4", "4", 1.0),
        ("4.0", "4", 0.0),  # texts are compared as texts
        ("5", 4.0, 0.0),
        ("0.5", 0.5, 1.0),
        ("four", 4, 0.0),
        ("True", True, 1.0),
        ("1", True, 0.0),
        ("b", [None, "b"], 1.0),
        ("None", None, None),
        ("", None, None),
        ("nan", math.nan, None),
        ("b", {"target": "b"}, None),
        ("", "", 1.0),
    ],
)
def test_equality(response, truth, reward):
    assert exact_match_reward(["p"], [response], ground_truth=[truth], level=[1]) == [reward]
    assert RULES["exact_match"](ScoringArguments()) is exact_match_reward
