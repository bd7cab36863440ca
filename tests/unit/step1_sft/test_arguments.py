"""The flags of step 1."""

from __future__ import annotations

from training.step1_sft.arguments import SftArguments
from training.utils.run.errors import Mistakes


def test_learning_rate():
    mistakes = Mistakes()
    SftArguments().validate(mistakes)
    assert mistakes.sentences == []
    SftArguments(learning_rate=0.0).validate(mistakes)
    assert mistakes.sentences == ["--learning_rate expects more than 0, got 0.0"]
