"""The settings every program has."""

from __future__ import annotations

from training.utils.run.errors import Mistakes
from training.utils.run.flags import note_mistakes
from training.utils.run.run_arguments import RunArguments


def test_one_default_seed():
    """DeepSpeed-Chat's step 3 had none, and drew its prompts from another split than steps 1 and 2."""
    assert RunArguments().seed == 1234
    mistakes = Mistakes()
    note_mistakes(RunArguments(), mistakes)
    assert mistakes.sentences == []


def test_a_negative_seed():
    mistakes = Mistakes()
    note_mistakes(RunArguments(seed=-1), mistakes)
    assert mistakes.sentences == ["--seed expects 0 or more, got -1"]
