"""The embedded task's checker, as a rule."""

from __future__ import annotations

import pytest

from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.rules import embedded
from training.utils.rewards.table import RULES


def test_the_checkers_score_of_each_response(monkeypatch):
    monkeypatch.setattr(embedded, "check", lambda prompt, response: float(len(prompt) * 10 + len(response)))
    assert embedded.embedded_reward(["p", "pp"], ["rrr", ""], ground_truth=[None, None]) == [13.0, 20.0]
    assert RULES["embedded"](ScoringArguments()) is embedded.embedded_reward


def test_every_prompt_has_a_response():
    with pytest.raises(ValueError):
        embedded.embedded_reward(["p", "q"], ["r"], ground_truth=[None, None])
