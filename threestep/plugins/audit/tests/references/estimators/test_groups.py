"""Groups, GAE and whitening, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from threestep.plugins.audit.references.estimators import groups as advantages

pytestmark = pytest.mark.unit

GROUP = np.array([7, 3, 7, 3, 9])
OUTCOME = np.array([1.0, 5.0, 0.0, 5.0, 2.0])


def test_groups_in_any_order():
    assert advantages.group_mean(OUTCOME, GROUP).tolist() == [0.5, 5.0, 0.5, 5.0, 2.0]
    std = advantages.group_std(OUTCOME, GROUP, 1.0)
    assert std == pytest.approx([math.sqrt(0.5), 0.0, math.sqrt(0.5), 0.0, 0.0])
    assert advantages.group_std(OUTCOME, GROUP, 0.0)[0] == pytest.approx(0.5)
    root = math.sqrt(0.5)
    assert advantages.grpo(OUTCOME, GROUP, std, 1e-9) == pytest.approx([root, 0.0, -root, 0.0, 0.0])
    assert advantages.rloo(OUTCOME, GROUP).tolist() == [1.0, 0.0, -1.0, 0.0, 0.0]


def test_gae_of_two_responses():
    rewards, values = np.array([1.0, 2.0, 1.0]), np.array([0.5, 1.0, 0.25])
    found = advantages.gae(rewards, values, np.array([2, 1]), gamma=0.5, lam=0.5)
    # The second response first: 1 - 0.25. Then 2 - 1 = 1, and 1 + 0.5 x 1 - 0.5 + 0.25 x 1 = 1.25.
    assert found == pytest.approx([1.25, 1.0, 0.75])
    bootstrapped = advantages.gae(rewards, values, np.array([2, 1]), gamma=0.5, lam=0.5, last_B=np.array([0.0, 0.25]))
    assert bootstrapped == pytest.approx([1.25, 1.0, 0.875])


def test_whitening():
    values, counts = np.array([1.0, 3.0, 50.0]), np.array([True, True, False])
    assert advantages.whitened(values, counts) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5), 0.0], abs=1e-7)
    # With two zeros: mean 1, squares 0 + 4 + 1 + 1 over 3.
    assert advantages.whitened(values, counts, more_zeros=2.0) == pytest.approx([0.0, math.sqrt(2.0), 0.0], abs=1e-7)
    assert advantages.whitened(values, counts, ddof=0.0)[1] == pytest.approx(1.0)
    assert advantages.whitened(np.ones(3), np.ones(3, dtype=bool)).tolist() == [0.0, 0.0, 0.0]
    assert advantages.whitened(values, np.array([True, False, False])).tolist() == [0.0, 0.0, 0.0]
