"""The final answer of GSM8K."""

from __future__ import annotations

import pytest

from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.rules.gsm8k import gsm8k_reward
from training.utils.rewards.table import RULES


@pytest.mark.parametrize(
    ("response", "reference", "reward"),
    [
        ("She has 5.\n#### 18", "18", 1.0),
        ("#### 18", 18, 1.0),
        ("#### 18.", "18", 1.0),
        ("#### 18.0", "18", 1.0),
        ("#### $18", "18", 1.0),
        ("#### 1,800", "1800", 1.0),
        ("#### 1800", "1,800", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 3", "-3", 0.0),
        ("#### 0.5", ".5", 1.0),
        ("#### 18 dollars", "18", 1.0),
        ("#### 180", "18", 0.0),
        ("#### 18.5", "18", 0.0),
        ("18", "18", 0.0),  # no mark, no answer
        ("#### 17 #### 18", "18", 1.0),  # the last mark counts
        ("#### 18 #### none", "18", 0.0),
        ("####", "18", 0.0),
        ("", "18", 0.0),
        ("#### eighteen", "18", 0.0),
        ("#### 18", None, 0.0),
        ("#### 18", "unknown", 0.0),
    ],
)
def test_answers(response, reference, reward):
    assert gsm8k_reward(["p"], [response], ground_truth=[reference], data_source=["gsm8k"]) == [reward]


def test_one_number_a_response():
    assert gsm8k_reward(["p"] * 3, ["#### 1", "#### 2", "3"], ground_truth=["1", "1", "3"]) == [1.0, 0.0, 0.0]
    assert RULES["gsm8k"](ScoringArguments()) is gsm8k_reward
