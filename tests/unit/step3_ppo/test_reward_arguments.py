"""The flags of rewards, checked before anything loads."""

from __future__ import annotations

import pytest

from training.step3_ppo.reward_arguments import RewardArguments
from training.utils.run.errors import Mistakes


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"reward_timeout": 0.0}, "--reward_timeout expects more than 0, got 0.0"),
        ({"reward_length_characters": 0}, "--reward_length_characters expects a whole number from 1 up, got 0"),
        ({"reward_regex": "a("}, "--reward_regex expects a regular expression, got 'a(': missing ), unterminated"),
    ],
)
def test_mistakes(given, sentence):
    mistakes = Mistakes()
    RewardArguments(**given).validate(mistakes)
    (said,) = mistakes.sentences
    assert said.startswith(sentence)


def test_the_defaults_are_sound():
    mistakes = Mistakes()
    RewardArguments().validate(mistakes)
    RewardArguments(reward_regex=r"\d+", reward_length_characters=1, reward_timeout=0.5).validate(mistakes)
    assert mistakes.sentences == []
