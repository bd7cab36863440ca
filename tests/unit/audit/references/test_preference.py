"""Losses of pairs, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from training.audit.references.preference import hinge_loss, ipo_loss, ranking_loss, sigmoid_loss

pytestmark = pytest.mark.unit


def test_losses_of_margins():
    log3 = np.array([math.log(3.0)])  # sigmoid 3/4
    assert sigmoid_loss(np.zeros(1), 0.3) == pytest.approx([math.log(2.0)])
    assert sigmoid_loss(log3, 1.0) == pytest.approx([-math.log(0.75)])
    assert sigmoid_loss(log3, 1.0, 0.1) == pytest.approx([-0.9 * math.log(0.75) - 0.1 * math.log(0.25)])
    assert ipo_loss(np.zeros(1), 0.5) == pytest.approx([1.0])
    assert hinge_loss(np.array([4.0, 20.0]), 0.1) == pytest.approx([0.6, 0.0])
    assert sigmoid_loss(np.array([-2000.0]), 1.0) == pytest.approx([2000.0])


def test_the_loss_of_scores():
    one, log3 = np.ones(1), np.array([math.log(3.0)])
    assert ranking_loss(one, one, np.zeros(1)) == pytest.approx([math.log(2.0)])
    assert ranking_loss(one + log3, one, np.zeros(1)) == pytest.approx([-math.log(0.75)])
    assert ranking_loss(one + log3, one, log3) == pytest.approx([math.log(2.0)])
    assert ranking_loss(one, one, np.zeros(1), centring=0.5) == pytest.approx([math.log(2.0) + 2.0])
