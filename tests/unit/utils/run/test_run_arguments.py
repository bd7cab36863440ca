"""The settings every program has."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes
from training.utils.run.run_arguments import FaultArguments, RunArguments


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


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_bad_steps": 0}, "--max_bad_steps expects 1 or more, got 0"),
        ({"rank_timeout": 0.0}, "--rank_timeout expects more than 0 and less than 1e+08, got 0.0"),
        ({"rank_timeout": float("nan")}, "--rank_timeout expects more than 0 and less than 1e+08, got nan"),
        ({}, None),
    ],
)
def test_the_values_of_fault_flags(given, sentence):
    mistakes = Mistakes()
    note_mistakes(FaultArguments(**given), mistakes)
    assert mistakes.sentences == ([] if sentence is None else [sentence])


def test_a_run_with_a_name_and_no_folder_is_in_a_folder_of_its_name():
    assert RunArguments(run_name="mine").output_dir == "runs/mine"
    assert RunArguments(run_name="mine", output_dir="out").output_dir == "out"
    for name in ("..", "a/b", " "):
        mistakes = Mistakes()
        note_mistakes(RunArguments(run_name=name), mistakes)
        expected = f"--run_name expects a name that a folder can have, got '{name}'; give another, or --output_dir"
        assert mistakes.sentences == [expected]
