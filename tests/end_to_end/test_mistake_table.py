"""The table of mistakes in docs/faults.md: every command ends with that sentence, code 2, and in seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import mistake_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
MOST_HUB_SECONDS = 15.0
AT_ONCE = 4

pytestmark = pytest.mark.timeout(900)  # on a busy machine


@pytest.fixture(scope="module")
def found():
    return mistake_table.answers(at_once=AT_ONCE)


@pytest.mark.parametrize("mistake", mistake_table.MISTAKES, ids=lambda mistake: mistake.name)
def test_one_sentence_as_the_page_has_it(found, mistake):
    end = found[mistake.name]
    assert end.code == 2 and end.sentence.startswith("error: ") and "Traceback" not in end.sentence, end
    row = rf"\| {re.escape(mistake.name)} \| [0-9.]+ \| {re.escape(mistake_table.shown(end.sentence))} \|"
    assert re.search(row, DOCUMENT.read_text()), f"{end}; python -m tests.support.mistake_table prints the table"


@pytest.mark.parametrize("mistake", [one for one in mistake_table.MISTAKES if one.hub], ids=lambda one: one.name)
def test_a_hub_out_of_reach_takes_seconds(found, mistake):
    assert found[mistake.name].seconds < MOST_HUB_SECONDS


def test_thirty_mistakes_each_with_a_name():
    names = [mistake.name for mistake in mistake_table.MISTAKES]
    assert len(names) >= 30 and len(set(names)) == len(names)
