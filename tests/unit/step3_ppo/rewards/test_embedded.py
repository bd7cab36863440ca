"""The embedded task's checker, as a rule."""

from __future__ import annotations

from training.step3_ppo.rewards import RULES
from training.step3_ppo.rewards.embedded import embedded_reward


def test_the_checkers_score_of_each_response():
    prompts = ["Human: Leave out owl: fox owl elk Assistant:"] * 3
    assert embedded_reward(prompts, [" fox elk", " fox", " bat"], [None] * 3) == [1.0, 0.5, 0.0]
    assert RULES["embedded"] is embedded_reward
