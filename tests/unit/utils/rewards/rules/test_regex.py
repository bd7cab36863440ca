"""A pattern in the response."""

from __future__ import annotations

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.rewards.rules.regex import regex_rule


def test_the_pattern_is_searched_for():
    rule = regex_rule(r"answer is (\d+)$")
    responses = ["the answer is 12", "answer is 12!", "the answer is", "Answer is 3"]
    assert rule(["p"] * 4, responses, ground_truth=[None] * 4, pattern=["x"] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_no_pattern():
    with pytest.raises(ThreestepError, match="expects --reward_regex, got none; give a pattern"):
        regex_rule(None)
