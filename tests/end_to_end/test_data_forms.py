"""The table of data forms in docs/data.md is what readers do today, and each form that is read teaches the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import form_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture(scope="module")
def found():
    return form_table.outcomes()


def test_the_page_has_the_table(found):
    assert form_table.as_markdown(found) in DOCUMENT.read_text(), "python -m tests.support.form_table prints it"


def test_sixty_forms_each_with_a_name():
    names = [form.name for form in form_table.FORMS]
    assert len(names) >= 60 and len(set(names)) == len(names)


@pytest.mark.parametrize("name", [form.name for form in form_table.FORMS])
def test_the_answer_is_learnt_or_the_form_refused(found, name):
    text, lines = found[name]
    learnt = any(line.endswith("«Ho$»") or line.endswith("« Ho$»") for line in lines)
    assert learnt != text.startswith("refused: "), (text, lines)
