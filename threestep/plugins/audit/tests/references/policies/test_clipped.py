"""The clipped surrogate and the value loss, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from threestep.plugins.audit.references.policies.clipped import clipped, value_loss

pytestmark = pytest.mark.unit


def test_the_clip_takes_the_smaller_surrogate():
    ratio, advantage = np.array([2.0, 2.0, 0.5, 0.5, 1.0]), np.array([1.0, -1.0, 1.0, -1.0, 3.0])
    assert clipped(ratio, advantage, 0.2, 0.2) == pytest.approx([-1.2, 2.0, -0.5, 0.8, -3.0])
    assert clipped(ratio, advantage, 0.2, 0.28)[0] == pytest.approx(-1.28)
    assert clipped(ratio, advantage, 0.2, 0.2, dual=1.5) == pytest.approx([-1.2, 1.5, -0.5, 0.8, -3.0])


def test_the_value_is_held_near_the_old_one():
    found = value_loss(np.array([2.0, 0.2]), np.zeros(2), np.array([1.0, 2.0]), 0.5)
    assert found == pytest.approx([0.5, 1.62])  # max(1, 0.25) / 2; (0.2 - 2)^2 / 2
