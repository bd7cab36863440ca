"""What --explain_steps cannot go with: as steps that are recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from threestep.plugins.explain.flags import ExplainArguments, check, step_needs
from training.utils.base.errors import Mistakes
from training.utils.flags.added import added_flags

pytestmark = pytest.mark.unit


def flags_of(steps: list[int]) -> Any:
    added = added_flags("step1_sft")(explain_ExplainArguments=ExplainArguments(steps))
    data = SimpleNamespace(form=SimpleNamespace())
    return SimpleNamespace(added=added, data=data, settings={"optimizer": "adamw"})


def test_parallel_paths_have_no_records_to_explain():
    mistakes = Mistakes()
    check(flags_of([]), mistakes)
    assert not mistakes.sentences
    check(flags_of([1]), mistakes)
    assert "--explain_steps expects sequences" in str(mistakes.sentences)


def test_an_explained_step_is_a_recorded_one():
    assert step_needs(flags_of([])) == ({"--explain_steps": False}, "")
    whole, own = step_needs(flags_of([1]))
    assert whole == {"--explain_steps": True} and own.startswith("steps are recorded")
