"""Tables in the documentation are what the programs do today. docs/reference/formats.md has forms of data; each that is
read teaches the answer. docs/lab_book/2026-q4-first-hour.md has mistakes; each ends with that sentence, code 2, and in
seconds."""

from __future__ import annotations

import re

import pytest

from tests.support import form_table, mistake_table
from tests.support.pages import ROOT

MOST_HUB_SECONDS = 15.0
AT_ONCE = 4

pytestmark = pytest.mark.timeout(900)  # on a busy machine


@pytest.fixture(scope="module")
def forms():
    return form_table.outcomes()


@pytest.fixture(scope="module")
def ends():
    return mistake_table.answers(at_once=AT_ONCE)


def test_the_page_has_the_table_of_forms(forms):
    page = (ROOT / "docs" / "reference" / "formats.md").read_text()
    assert form_table.as_markdown(forms) in page, "python -m tests.support.form_table prints it"


@pytest.mark.parametrize("name", [form.name for form in form_table.FORMS])
def test_the_answer_is_learnt_or_the_form_refused(forms, name):
    text, lines = forms[name]
    learnt = any(line.endswith("«Ho$»") or line.endswith("« Ho$»") for line in lines)
    assert learnt != text.startswith("refused: "), (text, lines)


@pytest.mark.parametrize("mistake", mistake_table.MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_ends_with_the_sentence_that_the_page_has(ends, mistake):
    end = ends[mistake.name]
    assert end.code == 2 and end.sentence.startswith("error: ") and "Traceback" not in end.sentence, end
    row = rf"\| {re.escape(mistake.name)} \| [0-9.]+ \| {re.escape(mistake_table.shown(end.sentence))} \|"
    page = (ROOT / "docs" / "lab_book" / "2026-q4-first-hour.md").read_text()
    assert re.search(row, page), f"{end}; python -m tests.support.mistake_table prints the table"
    assert not mistake.hub or end.seconds < MOST_HUB_SECONDS  # out of reach


@pytest.mark.parametrize(("table", "fewest"), [(form_table.FORMS, 60), (mistake_table.MISTAKES, 30)])
def test_entries_have_names_of_their_own(table, fewest):
    names = [each.name for each in table]
    assert len(names) >= fewest and len(set(names)) == len(names)
