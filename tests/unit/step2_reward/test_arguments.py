"""The flags of step 2."""

from __future__ import annotations

from training.step2_reward.arguments import RewardArguments
from training.utils.run.errors import Mistakes


def test_learning_rate():
    mistakes = Mistakes()
    RewardArguments().validate(mistakes)
    assert mistakes.sentences == []
    RewardArguments(learning_rate=0.0).validate(mistakes)
    assert mistakes.sentences == ["--learning_rate expects more than 0, got 0.0"]
