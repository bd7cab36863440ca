"""Rows that repeat an earlier one, against a set of their values."""

from __future__ import annotations

import random

import numpy as np
import pytest

from training.utils.contracts.rows import PromptRow, ResponsesRow, SentenceRow
from training.utils.data.rows.dataset import count_duplicates, write_rows


def ids(dice, most):
    return np.array([dice.randrange(2) for _ in range(dice.randrange(most))], np.int32)


def sentence(dice, place):
    input_ids = np.array([7, *ids(dice, 6)], np.int32)
    mask = np.arange(len(input_ids)) > dice.randrange(2)
    return SentenceRow(place, input_ids, mask), (tuple(input_ids), tuple(mask))


def pair(dice, place):
    prompt, *responses = (ids(dice, 3) for _ in range(3))
    row = ResponsesRow(place, prompt, tuple(responses))
    return row, (tuple(prompt), *map(tuple, responses))


def prompt(dice, place):
    flipped = ids(dice, 7)
    return PromptRow(place, flipped, "text", None), tuple(flipped)


@pytest.mark.parametrize("make", [sentence, pair, prompt])
@pytest.mark.parametrize("rows", [0, 1, 300, 5000])
def test_as_a_set_counts_them(make, rows, tmp_path):
    dice = random.Random(rows)
    made = [make(dice, place) for place in range(rows)]
    kind = type(made[0][0]) if made else SentenceRow
    write_rows(str(tmp_path / "rows.arrow"), kind, [row for row, _ in made])
    assert count_duplicates(str(tmp_path / "rows.arrow")) == rows - len({value for _, value in made})
