"""The line of the log that names choices."""

from __future__ import annotations

from training.utils.flags.auto import AutoChoice, sentence


def test_a_choice_is_named_with_its_reason_and_what_turns_it_off():
    on = [AutoChoice("a", True, "it is faster", off=False), AutoChoice("b", 64, "rows", off=0)]
    assert sentence([*on, AutoChoice("c", 0, "no rows")]) == (
        "auto: --a true (it is faster; false turns it off), --b 64 (rows; 0 turns it off), --c 0 (no rows)"
    )
