"""Rows of several portions, numbered through."""

from __future__ import annotations

import numpy as np
import pytest

from training.utils.data.build.portions import Portion, part_of

PORTIONS = [
    Portion("a", range(10), np.array([1, 3, 5]), 0),
    Portion("b", range(10), np.array([], np.int64), 10),
    Portion("c", range(10), np.array([0, 9]), 20),
]


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 5, {"a": [1, 3, 5], "c": [0, 9]}),
        (1, 4, {"a": [3, 5], "c": [0]}),
        (3, 5, {"c": [0, 9]}),
        (4, 9, {"c": [9]}),
        (0, 1, {"a": [1]}),
        (2, 2, {}),
    ],
)
def test_a_range_of_all_rows_as_the_portions_it_touches(begin, end, expected):
    parts = part_of(PORTIONS, begin, end)
    assert {part.source: part.indices.tolist() for part in parts} == expected
    assert all(part.first_row_id == {"a": 0, "c": 20}[part.source] for part in parts)
