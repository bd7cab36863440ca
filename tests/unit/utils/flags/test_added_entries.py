"""Flags that single entries of a table have: declared by a group, read by their entry, refused beside others."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest

from training.utils.base.errors import Mistakes
from training.utils.flags import added
from training.utils.flags.added import flags_of_entries, own_options, refuse_flags_of_others, with_added
from training.utils.flags.flags import flag


@dataclass
class Shared:
    share: float = flag(0.5, "Share.")


@dataclass
class Further(Shared):
    power: int = flag(2, "Power.")


@dataclass(frozen=True)
class Entry:
    compute: object
    flags: type | None = None


TABLE = {"plain": Entry(abs), "shared": Entry(abs, Shared), "further": Entry(abs, Further)}


@dataclass
class Group(flags_of_entries(TABLE)):  # type: ignore[misc]
    name: str = flag("plain", "Name.")


def test_a_group_has_the_flags_of_all_entries_once():
    assert [field.name for field in fields(Group)] == ["share", "power", "name"]


def test_an_entry_reads_its_own():
    given = Group(share=0.1, power=3)
    assert own_options(TABLE["plain"], given) is None
    assert own_options(TABLE["shared"], given) == Shared(0.1)
    assert own_options(TABLE["further"], given) == Further(0.1, 3)


@pytest.mark.parametrize(
    ("given", "names", "sentences"),
    [
        ({}, ["plain"], []),
        ({"power": 3}, ["further"], []),
        ({"power": 3}, ["plain", "further"], []),
        ({"power": 3}, ["shared"], ["--power 3 is for --kind further, and it is shared; leave it out"]),
        ({"share": 0.1}, ["plain"], ["--share 0.1 is for --kind shared or further, and it is plain; leave it out"]),
    ],
)
def test_flags_of_others_are_refused(given, names, sentences):
    mistakes = Mistakes()
    refuse_flags_of_others(TABLE, names, Group(**given), "kind", mistakes=mistakes)
    assert mistakes.sentences == sentences


def test_plugins_add_records_or_functions(monkeypatch):
    places = {"one": "a:ENTRY", "two": "a:function"}
    monkeypatch.setattr(added, "added", lambda table, own: places if table == "kinds" else {})
    found = SimpleNamespace(ENTRY=Entry(max, Shared), function=min)
    monkeypatch.setattr(added, "named_object", lambda place: getattr(found, place.partition(":")[2]))
    table = with_added("kinds", TABLE, Entry)
    assert table == {**TABLE, "one": Entry(max, Shared), "two": Entry(min)}
    assert with_added("others", TABLE, Entry) == TABLE
