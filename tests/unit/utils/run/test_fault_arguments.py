"""The flags of what a run does when something breaks."""

from __future__ import annotations

import pytest

from training.utils.run.errors import Mistakes
from training.utils.run.fault_arguments import FaultArguments


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_bad_steps": 0}, "--max_bad_steps expects a whole number from 1 up, got 0"),
        ({"rank_timeout": 0.0}, "--rank_timeout expects more than 0 seconds, got 0.0"),
        ({"rank_timeout": float("nan")}, "--rank_timeout expects more than 0 seconds, got nan"),
        ({}, None),
    ],
)
def test_mistakes(given, sentence):
    mistakes = Mistakes()
    FaultArguments(**given).validate(mistakes)
    assert mistakes.sentences == ([] if sentence is None else [sentence])
