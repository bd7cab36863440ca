"""What flags that record steps cannot go with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from threestep.plugins.audit.flags import RecordingArguments, check, step_needs
from training.utils.base.errors import Mistakes
from training.utils.flags.added import added_flags
from training.utils.flags.flags import note_mistakes

pytestmark = pytest.mark.unit


def flags_of(has_form: bool = False, optimizer: str = "adamw", **given: Any) -> Any:
    kind = added_flags("step1_sft")
    added = kind(audit_RecordingArguments=RecordingArguments(**given))
    data = SimpleNamespace(form=SimpleNamespace() if has_form else None)
    return SimpleNamespace(added=added, data=data, settings={"optimizer": optimizer})


@pytest.mark.parametrize(
    ("given", "refused"), [((False, [1]), False), ((True, []), False), ((True, [1]), True)], ids=str
)
def test_parallel_paths_are_not_recorded(given, refused):
    thinks, steps = given
    mistakes = Mistakes()
    check(flags_of(thinks, record_steps=steps), mistakes)
    expected = "--record_steps expects sequences that are one run of tokens each, and --parallel_thinking lays paths"
    assert [sentence.startswith(expected) for sentence in mistakes.sentences] == [True] * refused


@pytest.mark.parametrize("steps", [[], [1]])
def test_steps_of_another_optimizer_are_not_recorded(steps):
    mistakes = Mistakes()
    check(flags_of(optimizer="sign", record_steps=steps), mistakes)
    wanted = "--record_steps writes down and judges AdamW's steps, and --optimizer is sign; leave one of them out"
    assert mistakes.sentences == [wanted] * len(steps)


def test_a_recorded_step_reads_whole_rows_in_forwards_of_its_own():
    assert step_needs(flags_of()) == ({"--record_steps": False}, "")
    whole, own = step_needs(flags_of(record_steps=[2]))
    assert whole == {"--record_steps": True} and own.startswith("steps are recorded (--record_steps")


def test_values_are_of_records():
    mistakes = Mistakes()
    note_mistakes(RecordingArguments(record_values=True), mistakes)
    assert [sentence[:36] for sentence in mistakes.sentences] == ["--record_values expects --record_ste"]
