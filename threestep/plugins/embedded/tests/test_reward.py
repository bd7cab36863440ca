"""The checker as a reward."""

from __future__ import annotations

import pytest

from threestep.plugins.embedded import reward, task
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.table import kind_of, reward_name
from training.utils.rewards.weighted import rule_named

pytestmark = pytest.mark.unit


def test_the_checkers_score_of_each_response(monkeypatch):
    monkeypatch.setattr(task, "check", lambda prompt, response: float(len(prompt) * 10 + len(response)))
    rule = rule_named("embedded", ScoringArguments(), "--reward")
    assert rule is reward.embedded_reward
    assert rule(["p", "pp"], ["rrr", ""], ground_truth=[None, None]) == [13.0, 20.0]


def test_every_prompt_has_a_response():
    with pytest.raises(ValueError):
        reward.embedded_reward(["p", "q"], ["r"], ground_truth=[None, None])


def test_its_name_is_whole():
    assert reward_name("embedded:0.5") == "embedded" and kind_of("embedded_of_mine.py:score") is None
