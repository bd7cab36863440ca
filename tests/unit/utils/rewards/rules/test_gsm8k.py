"""The final answer of GSM8K."""

from __future__ import annotations

import math

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
        ("#### -$3", "-3", 1.0),
        ("#### \N{MINUS SIGN}3", "-3", 1.0),
        # References as files hold them: a whole solution, boxed, with units, a number of JSON.
        ("#### 72", "He sold 48/2 = <<48/2=24>>24, so 48+24 = 72.\n#### 72", 1.0),
        ("#### 24", "He sold 48/2 = <<48/2=24>>24, so 48+24 = 72.\n#### 72", 0.0),
        ("#### 1200", "It is 1,000 and 200.\n#### 1,200", 1.0),
        ("#### 42", r"First 6 and 7, so \boxed{42}.", 1.0),
        ("#### 42", r"so \boxed{\$42}", 1.0),
        ("#### 42", "42.0", 1.0),
        ("#### 42", 42.0, 1.0),
        ("#### 1800", "$1,800", 1.0),
        ("#### 1800", "1,800.00 dollars", 1.0),
        ("#### 1800", "A: 1800", 1.0),
        ("#### 1000", "1e3", 1.0),
        ("#### 18", ["17", 18], 1.0),
        ("#### 18", None, None),
        ("#### 18", "unknown", None),
        ("#### 18", "between 17 and 18", None),
        ("#### 18", math.nan, None),
        ("#### 18", {"answer": 18}, None),
        ("#### 1", True, None),
    ],
)
def test_answers(response, reference, reward):
    assert gsm8k_reward(["p"], [response], ground_truth=[reference], data_source=["gsm8k"]) == [reward]


def test_one_number_a_response():
    assert gsm8k_reward(["p"] * 3, ["#### 1", "#### 2", "3"], ground_truth=["1", "1", "3"]) == [1.0, 0.0, 0.0]
    assert RULES["gsm8k"](ScoringArguments()) is gsm8k_reward
