"""Every rule by its name."""

from __future__ import annotations

import pytest

from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.table import RULES


@pytest.mark.parametrize("name", RULES)
def test_every_rule_takes_an_empty_response(name):
    if name == "math":
        pytest.importorskip("math_verify")
    rule = RULES[name](ScoringArguments(reward_regex="x", reward_length_characters=5))
    given = rule(["Human: Sort: owl fox Assistant:"], [""], ground_truth=["5"], data_source=[None])
    assert given == [0.0]
