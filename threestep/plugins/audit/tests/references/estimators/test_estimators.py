"""Estimators beside GAE and groups, on the hand-worked rows of their docstrings."""

from __future__ import annotations

import numpy as np
import pytest

from threestep.plugins.audit.references.estimators import best, lengths, returns, token_baseline

pytestmark = pytest.mark.unit

GROUP = np.array([5, 5, 2, 2])


def test_rewards_to_go():
    assert returns.to_go(np.array([1.0, 2.0, 3.0]), np.array([2, 1]), 0.5).tolist() == [2.0, 2.0, 3.0]
    assert returns.remax(np.array([1.0]), np.array([1]), np.array([0.25])).tolist() == [0.75]


def test_the_length_weighted_baseline():
    found = lengths.opo(np.array([1.0, 0.0, 3.0, 3.0]), GROUP, np.array([1, 3, 1, 9]))
    assert found == pytest.approx([0.75, -0.25, 0.0, 0.0])


def test_the_best_of_a_group():
    assert best.passk(np.array([3.0, 1.0, 2.0, 7.0]), np.array([0, 0, 0, 1])).tolist() == [1.0, 0.0, 0.0, 0.0]
    apart = np.array([True, True, False, False])
    assert best.gpg(np.array([1.0, 0.0, 2.0, 2.0]), GROUP, apart).tolist() == [1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize(("zero_tail", "tail"), [(True, 2.0), (False, 0.0)])
def test_the_optimal_token_baseline(zero_tail, tail):
    """Returns 1 and 0 at the first token, w 1 and 3: baseline 1/4. The longer response goes on alone."""
    rewards, energy = np.array([1.0, -2.0, 2.0]), np.array([1.0, 3.0, 3.0])
    found = token_baseline.optimal(rewards, energy, np.array([1, 2]), np.array([0, 0]), zero_tail=zero_tail)
    assert found == pytest.approx([0.75, -0.25, tail])
    plain = token_baseline.optimal(rewards, 0 * energy, np.array([1, 2]), np.array([0, 0]))
    assert plain[:2] == pytest.approx([0.5, -0.5])
