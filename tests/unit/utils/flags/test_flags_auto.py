"""The line of the log that names choices."""

from __future__ import annotations

import yaml

from training.utils.checkpoints.arguments import KEPT_AS_BEGUN
from training.utils.flags.flags import AutoChoice, chosen_in, marked, sentence
from training.utils.flags.step import known_steps


def test_a_choice_is_named_with_its_reason_and_what_turns_it_off():
    on = [AutoChoice("a", True, "it is faster", off=False), AutoChoice("b", 64, "rows", off=0)]
    assert sentence([*on, AutoChoice("c", 0, "no rows")]) == (
        "auto: --a true (it is faster; false turns it off), --b 64 (rows; 0 turns it off), --c 0 (no rows)"
    )


def test_marks_name_what_was_chosen_and_change_no_value():
    settings = {"a": True, "ab": 0, "data_split": "0,0,1", "text": "two\nlines: 1", "wide": "word " * 40}
    plain = yaml.safe_dump(settings)
    text = marked(plain, ["a", "data_split"])
    assert chosen_in(text) == {"a", "data_split"} and chosen_in(plain) == set()
    assert yaml.safe_load(text) == settings and marked(plain, []) == plain


def test_a_flag_that_is_left_out_is_left_to_the_program():
    """So a resumed run leaves out what was chosen for it. Step 3's --share_beginnings is never open."""
    for step in known_steps().values():
        closed = {"share_beginnings"} if step.number == "3" else set()
        for name in KEPT_AS_BEGUN.keys() & step.defaults.keys() - closed:
            assert step.defaults[name] == KEPT_AS_BEGUN[name], (step, name)
