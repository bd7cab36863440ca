"""The length of the response against a target."""

from __future__ import annotations

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.rewards.rules.length import length_rule


def test_by_hand():
    # 1 - |n - 8| / 8: at 8 nothing is missing, at 6 and 10 a quarter, at 0 and 16 all; beyond it stays 0.
    responses = ["x" * characters for characters in (8, 6, 10, 0, 16, 40)]
    assert length_rule(8)(["p"] * 6, responses, ground_truth=[None] * 6) == [1.0, 0.75, 0.75, 0.0, 0.0, 0.0]


def test_characters_are_no_bytes():
    assert length_rule(2)(["p"], ["äß"]) == [1.0]


def test_no_target():
    with pytest.raises(ThreestepError, match="expects a target as --reward_length_characters, got none; give a n"):
        length_rule(None)
