"""Weights against a mismatch, on the hand-worked rows of the docstrings."""

from __future__ import annotations

import numpy as np
import pytest

from threestep.plugins.audit.references.corrections import Rule, normalised, weights

pytestmark = pytest.mark.unit

APART, ONE = np.log(np.array([2.0, 0.25])), np.zeros(2, dtype=np.int64)


@pytest.mark.parametrize(
    ("rule", "right"),
    [
        (Rule("truncate", most=1.5), [1.5, 0.25]),
        (Rule("truncate", most=1.5, least=0.5), [1.5, 0.5]),
        (Rule("truncate", "sequence", 1.5), [0.5, 0.5]),
        (Rule("truncate", "geometric", 1.5), [0.5**0.5] * 2),
        (Rule("mask", most=4.0), [2.0, 0.25]),
        (Rule("mask", most=2.0), [2.0, 0.0]),
    ],
)
def test_weights_by_hand(rule, right):
    assert weights(APART, ONE, rule) == pytest.approx(right)


def test_normalised_weights():
    counts = np.array([True, True, False])
    found = normalised(np.array([1.0, 3.0, 9.0]), np.array([0, 1, 1]), counts, "token")
    assert found == pytest.approx([0.5, 1.5, 4.5])
    by_response = normalised(np.array([1.0, 3.0, 3.0]), np.array([0, 1, 1]), np.ones(3, dtype=bool), "sequence")
    assert by_response == pytest.approx([0.5, 1.5, 1.5])
