"""The check of an environment: each fault is found, by its name, and a sound one has none."""

from __future__ import annotations

import json

import pytest

from threestep.plugins.environments.conversations import SCRIPTS
from threestep.plugins.environments.findings import GOOD, UNDECIDED, WRONG, Check, check
from threestep.plugins.environments.rows import whole_row
from threestep.plugins.environments.text import as_json, as_lines, page

pytestmark = pytest.mark.unit

ROW = whole_row({"ground_truth": "thirty-seven", "prompt": "What?"})


@pytest.fixture
def checked(load):
    """The check of a class of the file."""

    def made(name, row=ROW, **given):
        return check(load(name), Check([row], seed=1, turns=given.pop("turns", 4), **given))

    return made


def states(found):
    return {finding.name: finding.state for finding in found.findings}


def test_nothing_is_wrong_with_a_sound_one(checked):
    found = checked("Sound", reward_range=(-0.31, 1.0))
    assert set(states(found).values()) == {GOOD}
    assert found.is_good
    by_script = {each.script: each for each in found.scripts}
    assert by_script["nothing"].turns == (3, 3)
    assert by_script["nothing"].rewards == pytest.approx((-0.3, -0.3))
    assert by_script["the answer"].rewards == (1.0, 1.0)
    assert "a call with odd arguments" not in by_script  # it has no tools


def test_calls_are_of_environments_with_tools(checked):
    found = checked("Tooled", reward_range=(-1, 1))
    assert {each.script for each in found.scripts} == set(SCRIPTS)
    assert states(found)["nonsense"] == GOOD
    told = [reply.messages[0]["content"] for reply in found.example[1].replies]
    assert set(told) == {"1 calls"}  # the longest conversation is one of calls


@pytest.mark.parametrize(
    ("name", "question", "words"),
    [
        ("Greets", "beginning", "begins otherwise under another seed"),
        ("Moody", "repeats", "the second time"),
        ("Shared", "apart", "beside others"),
        ("Fragile", "nonsense", "fails at 'a very long text': environment 'Fragile': step raised OverflowError"),
        ("Generous", "pay for nonsense", "the ground truth was paid 1"),
        ("Leaky", "leaks", "in a reply to"),
        ("Told", "leaks", "the opening"),
        ("Unready", "reset", "reset raised KeyError"),
    ],
)
def test_each_fault_is_found(checked, name, question, words):
    found = checked(name)
    if name == "Generous":  # where all pays alike, the answer does not tell
        assert states(found)[question] == UNDECIDED
        return
    (finding,) = [each for each in found.findings if each.name == question]
    assert finding.state == WRONG
    assert words in finding.sentence
    assert not found.is_good


def test_a_fault_is_not_found_where_there_is_none(checked):
    assert states(checked("Shared"))["repeats"] == GOOD
    assert states(checked("Leaky"))["repeats"] == GOOD
    assert states(checked("Moody"))["leaks"] == GOOD


def test_rewards_outside_of_the_range_are_wrong(checked):
    (finding,) = [each for each in checked("Sound", reward_range=(0, 1)).findings if each.name == "rewards"]
    assert finding.state == WRONG
    assert "from -0.3 to 1, 2 different values; expected from 0 to 1" in finding.sentence


def test_without_a_ground_truth_leaks_are_undecided(checked):
    found = checked("Sound", row=whole_row({"ground_truth": "7"}))
    assert states(found)["leaks"] == UNDECIDED  # one character stands anywhere
    assert states(checked("Sound", row=whole_row({})))["leaks"] == UNDECIDED


def test_a_word_is_not_leaked_by_a_longer_one(checked):
    row = whole_row({"ground_truth": "left"})
    assert states(checked("Sound", row=row))["leaks"] == WRONG  # "2 left"
    assert states(checked("Sound", row=whole_row({"ground_truth": "lef"})))["leaks"] == GOOD


def test_conversations_that_never_end_stop_at_the_limit(checked):
    found = checked("Sound", turns=2)
    (length,) = [each for each in found.findings if each.name == "length"]
    assert length.sentence.startswith("1 to 2 turns")


def test_lines_json_and_page_have_every_finding(checked):
    found = checked("Fragile")
    lines = list(as_lines("a.py:Fragile", found))
    assert lines[0] == "a.py:Fragile: wrong: nonsense"
    assert len(lines) == 1 + len(found.findings)
    printed = json.loads(json.dumps(as_json("a.py:Fragile", found), allow_nan=False))
    assert printed["is_good"] is False
    assert {each["script"] for each in printed["scripts"]} == {each.script for each in found.scripts}
    html = page("a.py:<b>Fragile", found)
    assert "a.py:&lt;b&gt;Fragile" in html and "<b>Fragile" not in html
    assert "OverflowError" in html
