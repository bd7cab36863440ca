"""The flags of step 2."""

from __future__ import annotations

import pytest

from training.step2_reward.arguments import RewardModelArguments
from training.utils.run.errors import Mistakes
from training.utils.run.flags import note_mistakes


def sentences(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(RewardModelArguments(**given), mistakes)
    return mistakes.sentences


def test_the_defaults_are_sound():
    assert sentences() == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"learning_rate": 0.0}, "--learning_rate expects more than 0, got 0.0"),
        ({"margin_scale": -1.0}, "--margin_scale expects 0 or more, got -1.0"),
        ({"center_coef": -0.1}, "--center_coef expects 0 or more, got -0.1"),
        ({"normalization_rows": -1}, "--normalization_rows expects 0 or more, got -1"),
        (
            {"label_smoothing": 0.5},
            "--label_smoothing expects 0 or more and less than 0.5, got 0.5",
        ),
    ],
)
def test_a_setting_that_cannot_be(given, sentence):
    assert sentences(**given) == [sentence]
