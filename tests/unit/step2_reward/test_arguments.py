"""The flags of step 2."""

from __future__ import annotations

import pytest

from training.step2_reward.arguments import RewardArguments
from training.utils.run.errors import Mistakes


def sentences(**given) -> list[str]:
    mistakes = Mistakes()
    RewardArguments(**given).validate(mistakes)
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
            "--label_smoothing expects a share from 0 to below 0.5 (at 0.5 no order is left to learn), got 0.5",
        ),
    ],
)
def test_a_setting_that_cannot_be(given, sentence):
    assert sentences(**given) == [sentence]
