"""Flags that plugins add: a group that a step does not have stands for its defaults."""

from __future__ import annotations

import dataclasses

import pytest

from training.utils.flags import added
from training.utils.flags.added import AddedFlags, added_flags

pytestmark = pytest.mark.unit


@dataclasses.dataclass
class Cheers:
    cheers: int = 1


@dataclasses.dataclass
class Boos:
    boos: int = 0


def test_groups_are_found_by_their_class(monkeypatch):
    monkeypatch.setattr(added, "flag_groups", {"step1_sft": {"cheering_Cheers": Cheers}}.__getitem__)
    kind = added_flags("step1_sft")
    flags = kind(cheering_Cheers=Cheers(3))
    assert isinstance(flags, AddedFlags)
    assert flags.of(Cheers).cheers == 3 and kind().of(Cheers).cheers == 1


def test_a_group_that_a_step_does_not_have_has_its_defaults():
    assert AddedFlags().of(Boos) == Boos()
