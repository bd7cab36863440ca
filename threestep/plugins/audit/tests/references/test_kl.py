"""Estimators at p = 1/2, p_ref = 1, and at equality."""

from __future__ import annotations

import math

import numpy as np
import pytest

from threestep.plugins.audit.references.kl import ESTIMATORS

pytestmark = pytest.mark.unit

LOG2 = math.log(2.0)


@pytest.mark.parametrize(("name", "right"), [("k1", -LOG2), ("k2", LOG2**2 / 2), ("k3", 1.0 - LOG2), ("abs", LOG2)])
def test_estimators_by_hand(name, right):
    half, one = np.log(np.array([0.5, 0.25])), np.log(np.array([1.0, 0.25]))
    assert ESTIMATORS[name](half, one) == pytest.approx([right, 0.0])
