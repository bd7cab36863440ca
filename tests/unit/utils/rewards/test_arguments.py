"""The flags of rewards, checked before anything loads."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes
from training.utils.rewards.arguments import ScoringArguments


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"reward_timeout": 0.0}, "--reward_timeout expects more than 0, got 0.0"),
        ({"reward_length_characters": 0}, "--reward_length_characters expects 1 or more, got 0"),
        ({"reward_regex": "a("}, "--reward_regex expects a regular expression, got 'a(': missing ), unterminated"),
    ],
)
def test_mistakes(given, sentence):
    mistakes = Mistakes()
    note_mistakes(ScoringArguments(**given), mistakes)
    (said,) = mistakes.sentences
    assert said.startswith(sentence)


def test_the_defaults_are_sound():
    mistakes = Mistakes()
    note_mistakes(ScoringArguments(), mistakes)
    note_mistakes(ScoringArguments(reward_regex=r"\d+", reward_length_characters=1, reward_timeout=0.5), mistakes)
    assert mistakes.sentences == []
