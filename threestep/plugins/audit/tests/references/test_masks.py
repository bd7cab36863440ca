"""The masks of the worked example, and what is moved."""

from __future__ import annotations

import numpy as np
import pytest

from threestep.plugins.audit.references import masks

pytestmark = pytest.mark.unit

F, T = False, True
SEQUENCE = np.array([0, 0, 0, 0, 0, 1, 1, 1])


def bools(*values):
    return np.array(values, dtype=bool)


def test_the_mask_of_the_worked_example():
    data, real, first = bools(F, F, T, T, F), bools(T, T, T, T, F), bools(T, F, F, F, F)
    assert masks.loss_mask(data, real, first).tolist() == [F, F, T, T, F]
    assert masks.loss_mask(bools(T, T, T, T, T), real, first).tolist() == [F, T, T, T, F]


def test_values_move_within_their_sequence():
    values = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    assert masks.shifted(values, 1, SEQUENCE).tolist() == [0, 1, 2, 3, 4, 0, 6, 7]
    assert masks.shifted(values, -1, SEQUENCE).tolist() == [2, 3, 4, 5, 0, 7, 8, 0]


def test_runs_end_and_begin_within_their_sequence():
    mask = bools(F, T, T, F, T, T, F, T)
    assert masks.run_ends(mask, SEQUENCE).tolist() == [F, F, T, F, T, T, F, T]
    assert masks.run_begins(mask, SEQUENCE).tolist() == [F, T, F, F, T, T, F, T]
