"""Prompts with the responses of other rows: which, and that nothing but the rows decides it."""

from __future__ import annotations

from typing import Any

import numpy as np

from training.utils.contracts.rows import MarkedRow
from training.utils.preference.batches import MismatchedRows, mismatched
from training.utils.setup.training_run import TrainingRun


def made(prompts: str, response_tokens: int = 2) -> list[MarkedRow]:
    """A row for each letter, which is its prompt; its response names the row."""
    return [
        MarkedRow(
            i, np.array([ord(letter)], np.int32), (np.full(response_tokens, 1000 + i, np.int32),), is_good=i % 2 == 0
        )
        for i, letter in enumerate(prompts)
    ]


def partners(rows: list[MarkedRow]) -> list[int]:
    found = MismatchedRows(rows, 99)
    assert len(found) == len(rows)
    return [int(row.response_ids[0][0]) - 1000 for row in found]


def test_each_row_gives_its_response_once_where_prompts_differ():
    rows = made("abcdefghijk")
    assert sorted(partners(rows)) == list(range(11)) and all(i != other for i, other in enumerate(partners(rows)))
    assert partners(rows) == partners(rows)
    assert partners(rows) != [(i + 1) % 11 for i in range(11)]  # neighbours are often of one prompt


def test_the_same_prompt_is_passed_over():
    rows = made("aaaabaacd")
    for i, other in enumerate(partners(rows)):
        assert rows[i].prompt_ids[0] != rows[other].prompt_ids[0]


def test_where_all_prompts_are_equal_or_one_row_is_left():
    assert sorted(partners(made("aaa"))) == [0, 1, 2] and partners(made("a")) == [0]
    assert len(MismatchedRows([], 9)) == 0


def test_the_rest_of_the_row_stays_and_long_responses_are_cut():
    rows = made("abc", response_tokens=7)
    for row, other in zip(rows, MismatchedRows(rows, 5), strict=True):
        assert other.row_id == row.row_id and other.is_good is row.is_good
        assert other.prompt_ids is row.prompt_ids and len(other.response_ids) == 1
        assert len(other.response_ids[0]) == 4  # with the prompt, 5 tokens
    assert rows[0].response_ids[0].shape == (7,)


def test_a_run_on_them():
    nothing: Any = None
    rows = made("abcd")
    found = mismatched(TrainingRun(nothing, rows, rows[:2], nothing, nothing), 9)
    assert isinstance(found.train_rows, MismatchedRows) and len(found.eval_rows) == 2
