"""Columns in capitals are found, misspelt ones are named, and numbers beside choices are not taken for answers."""

from __future__ import annotations

import pytest

from tests.unit.utils.data.formats.test_formats import kinds_of
from training.utils.base.errors import ThreestepError
from training.utils.data.formats.formats import (
    FileColumns,
    as_formats_spell,
    check_numbers,
    nearest_format,
    recognise,
)
from training.utils.data.formats.records import Record


def recognised(row, data_format=None, **columns):
    return recognise(kinds_of([row]), FileColumns(**columns), data_format, "f")


def test_capitals_and_blanks():
    row = {" Prompt": "a", "Completion ": "b", "System": "s", "Label": True}
    found = recognised(row)
    assert found.name == "prompt_completion"
    assert found.roles == {"system": "System", "prompt": " Prompt", "chosen": "Completion ", "label": "Label"}
    assert recognised({"Question": "a", "Answer": "b"}, "question_answer").roles["prompt"] == "Question"
    record = found.read(row, found.roles, "f")
    assert [message["content"] for message in record.prompt_messages or ()] == ["s", "a"]
    assert [message["content"] for message in record.chosen_messages or ()] == ["b"]


def test_exact_names_come_first():
    row = {"question": "a", "answer": "b", "Question": "c", "ANSWER": "d"}
    assert recognised(row).roles == {"prompt": "question", "chosen": "answer"}
    assert as_formats_spell({"A": {}, "a": {}}, lambda kinds: False) == {"A": "A", "a": "a"}


@pytest.mark.parametrize(
    ("columns", "remark"),
    [
        (["questoin", "answer"], "; the nearest is question_answer, if 'questoin' is its 'question'"),
        (["Promt", "Completion"], "; the nearest is prompt_completion, if 'Promt' is its 'prompt'"),
        (["left", "right"], ""),
        (["questoin", "anwser"], ""),  # nothing is sure
    ],
)
def test_the_nearest_format(columns, remark):
    needs = {"prompt_completion": "prompt, completion", "question_answer": "question, answer", "text": "text"}
    assert nearest_format(columns, needs) == remark


def test_a_flag_beside_a_format():
    with pytest.raises(ThreestepError) as caught:
        recognised({"question": "a", "answer": "b"}, "question_answer", prompt="Question")
    assert str(caught.value) == (
        "f: --data_format question_answer expects the columns question, answer, and the columns are 'answer', "
        "'question', without 'Question' of --prompt_column; did you mean 'question'; name the right one with it"
    )


def test_numbers_are_their_text():
    row = {"question": "a", "answer": 7, "rejected": 2.5}
    found = recognised(row)
    record = found.read(row, found.roles, "f")
    assert record.chosen_messages == [{"role": "assistant", "content": "7"}]
    assert record.rejected_messages == [{"role": "assistant", "content": "2.5"}]
    pair = recognised({"prompt": "a", "chosen": 1, "rejected": 2})
    assert pair.read({"prompt": "a", "chosen": 1, "rejected": 2}, pair.roles, "f") == Record("a", "1", "2")


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (4.0, "f: column 'answer': expected text or a number that is one text alone, got 4.0; write it as text, "
              '"4" or "4.0"'),
        (float("nan"), "one text alone, got nan; write it as text, or null if there is none"),
        (float("inf"), "one text alone, got inf; write it as text, or null if there is none"),
    ],
)  # fmt: skip
def test_a_number_of_several_texts(number, sentence):
    found = recognised({"question": "a", "answer": number})
    with pytest.raises(ThreestepError) as caught:
        found.read({"question": "a", "answer": number}, found.roles, "f")
    assert sentence in str(caught.value)


def test_a_place_is_no_answer():
    kinds = kinds_of([{"answer": 1, "Choices": ["a"]}])
    with pytest.raises(
        ThreestepError, match="f, line 1: column 'answer' holds numbers beside 'Choices', so they may be"
    ):
        check_numbers(kinds, "answer")
    check_numbers(kinds_of([{"answer": "a", "choices": ["a"]}]), "answer")
    check_numbers(kinds_of([{"answer": 1}]), "answer")
