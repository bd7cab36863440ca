"""A score at the end, and the KL on the way."""

from __future__ import annotations

import numpy as np
import pytest

from threestep.plugins.audit.references.rewards import at_ends, shaped

pytestmark = pytest.mark.unit


def test_rewards_by_hand():
    scores, lengths = np.array([1.5, -2.0]), np.array([2, 1])
    assert shaped(scores, np.array([2.0, 1.0, 0.0]), lengths, 0.1) == pytest.approx([-0.2, 1.4, -2.0])
    assert at_ends(scores, lengths, back=1).tolist() == [1.5, 0.0, -2.0]
    assert at_ends(scores, lengths, back=99).tolist() == [1.5, 0.0, -2.0]
