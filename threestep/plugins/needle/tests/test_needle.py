"""The needle: where its facts stand, what is asked, its settings, and that nothing depends on the machine."""

from __future__ import annotations

import re

import pytest

from tests.support.data_flags import raw_dataset_of
from tests.unit.utils.data.test_fingerprint_row_versions import digest, texts_of
from threestep.plugins.embedded.task import WORDS
from threestep.plugins.needle.needle import (
    HELD_OUT_ROWS,
    ROWS_VERSION,
    Fact,
    NeedleDataset,
    NeedleSettings,
    make_row,
    parse_settings,
)
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.data.registry import find_dataset, registered_names
from training.utils.rewards.rules import exact_match_reward

pytestmark = pytest.mark.unit

SETTINGS = NeedleSettings(words=40, facts=4)
FACT = re.compile(r"The number of (\w+) is (\d \d)\.")


def read(row):
    """The facts of a row in their order, the name asked for, and the words before each fact."""
    text, name = re.fullmatch(r"Human: (.*) What is the number of (\w+)\? Assistant:", row.prompt).groups()
    pieces = FACT.split(text)
    between = [piece.split() for piece in pieces[::3]]
    facts = [Fact(*pair) for pair in zip(pieces[1::3], pieces[2::3], strict=True)]
    before = [sum(len(words) for words in between[: place + 1]) for place in range(len(facts))]
    return facts, name, before, [word for words in between for word in words]


@pytest.mark.parametrize("held_out", [False, True])
def test_each_row_asks_for_one_fact_of_its_first_half(held_out):
    places = []
    for index in range(200):
        row = make_row(3, index, SETTINGS, held_out)
        facts, name, before, words = read(row)
        assert len({fact.name for fact in facts}) == SETTINGS.facts and len(words) == SETTINGS.words
        assert set(words) <= set(WORDS)
        (asked,) = (fact for fact in facts if fact.name == name)
        assert row.answer == f" {asked.number}" and asked.is_held_out == held_out
        assert re.fullmatch(r" \d \d", row.wrong) and row.wrong != row.answer
        numbers = {fact.number for fact in facts}  # another fact's, where there is one
        assert held_out or row.wrong.strip() in numbers or len(numbers) == 1
        assert before[facts.index(asked)] <= SETTINGS.words // 2
        places.append(before[facts.index(asked)])
        assert exact_match_reward([row.prompt] * 2, [row.answer, row.wrong], [row.answer.strip()] * 2) == [1.0, 0.0]
    assert min(places) <= 2 and max(places) >= 18  # anywhere in the first half
    facts, *_ = read(make_row(1, 0, NeedleSettings(words=9, facts=16)))
    assert {fact.name for fact in facts} == set(WORDS)


def test_rows_follow_from_seed_and_index_and_differ():
    rows = [make_row(seed, index, SETTINGS, held_out) for seed in (1, 2) for index in (0, 1) for held_out in (0, 1)]
    assert len({row.prompt for row in rows}) == 8
    assert make_row(2, 1, SETTINGS) == rows[6]


def test_settings_stand_behind_the_name():
    assert parse_settings("needle") == NeedleSettings()
    assert parse_settings("needle,facts=3,words=16000,rows=7") == NeedleSettings(16000, 3, 7)
    for given, words in (
        ("word=3", "expected only words, facts, rows after the name, got 'word'.*words"),
        ("facts=17", "facts expects 1 to 16, got '17'"),
        ("words=2k", "words expects 1 or more, got '2k'"),
    ):
        with pytest.raises(ThreestepError, match=words):
            parse_settings(f"needle,{given}")


def test_the_dataset_is_registered_and_makes_rows_when_they_are_read():
    raw = raw_dataset_of("needle,words=40,facts=4,rows=30", DataArguments(), seed=3)
    train, held_out = raw.get_train_data(), raw.get_eval_data()
    assert (len(train), len(held_out)) == (30, HELD_OUT_ROWS)
    row = make_row(3, 5, SETTINGS)
    assert train[5] == row and train[-25] == row and train[4:6] == [train[4], row]
    assert held_out[5] == make_row(3, 5, SETTINGS, held_out=True)
    assert [raw.get_prompt(row), raw.get_chosen(row), raw.get_rejected(row)] == [row.prompt, row.answer, row.wrong]
    assert raw.get_reference(row) == row.answer.strip()
    with pytest.raises(IndexError):
        train[30]
    other = raw_dataset_of("needle,words=41,facts=4,rows=30", DataArguments(), seed=3)
    assert raw.get_fingerprint() != other.get_fingerprint()


def test_rows_of_a_version_are_the_same():
    """Where they change, so must `ROWS_VERSION`."""
    made = NeedleDataset("", 1, 0, "needle,words=9,facts=2")
    assert (ROWS_VERSION, digest(texts_of(made))) == ("1", "84ea3ecbe11d7d54")
    assert find_dataset("needle,words=9") is NeedleDataset and "needle" in registered_names()
