"""The flags of what a run does when something breaks."""

from __future__ import annotations

import pytest

from training.utils.run.errors import Mistakes
from training.utils.run.fault_arguments import FaultArguments
from training.utils.run.flags import note_mistakes


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_bad_steps": 0}, "--max_bad_steps expects 1 or more, got 0"),
        ({"rank_timeout": 0.0}, "--rank_timeout expects more than 0 and less than 1e+08, got 0.0"),
        ({"rank_timeout": float("nan")}, "--rank_timeout expects more than 0 and less than 1e+08, got nan"),
        ({}, None),
    ],
)
def test_mistakes(given, sentence):
    mistakes = Mistakes()
    note_mistakes(FaultArguments(**given), mistakes)
    assert mistakes.sentences == ([] if sentence is None else [sentence])
