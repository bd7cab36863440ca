"""Which flags are suggested for a name that is none."""

from __future__ import annotations

import pytest

from training.utils.flags.flag_names import nearest_flags

FLAGS = ["learning_rate", "num_train_epochs", "gradient_accumulation_steps", "output_dir", "eval_interval"]


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("learning_rat", "learning_rate"),
        ("output-dir", "output_dir"),
        ("accumulation_steps", "gradient_accumulation_steps"),
        ("train_epochs", "num_train_epochs"),
    ],
)
def test_the_nearest_comes_first(typed, first):
    assert nearest_flags(typed, FLAGS).startswith(f"; did you mean '{first}'")


def test_nothing_is_suggested_for_what_resembles_nothing():
    assert nearest_flags("qqqq", FLAGS) == ""
