"""The policy's losses on the hand-worked rows of their docstrings."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from threestep.plugins.audit.references.policies import LOSSES
from threestep.plugins.audit.references.policies.covariance import covariances
from threestep.plugins.audit.references.policies.tokens import Bounds, Tokens

pytestmark = pytest.mark.unit

ALL, ONE = np.array([True, True]), np.ones(2)


def tokens(log_ratio: list[float], advantage: np.ndarray = ONE, new: float = -1.0) -> Tokens:
    """Two tokens of one sequence."""
    new_T = np.full(2, new)
    return Tokens(new_T, new_T, new_T - np.array(log_ratio), advantage, ALL, np.zeros(2, dtype=np.int64))


@pytest.mark.parametrize(
    ("name", "given", "bounds", "right"),
    [
        ("ppo", tokens([math.log(2.0), 0.0]), Bounds(), [-1.2, -1.0]),
        ("ppo", tokens([math.log(8.0), 0.0], -ONE), Bounds(dual=3.0), [3.0, 1.0]),
        ("gspo", tokens([0.2, 0.0]), Bounds(1.0, 1.0), [-math.exp(0.1)] * 2),
        ("cispo", tokens([math.log(2.0), 0.0]), Bounds(0.5, 0.5), [1.5, 1.0]),
        ("geo_mean", tokens([0.6, 0.0]), Bounds(0.4, 0.4), [-math.exp(0.2)] * 2),
        ("sapo", tokens([0.0, 0.0]), Bounds(), [-2.0, -2.0]),
        ("gpg", tokens([0.5, 0.5], 2 * ONE), Bounds(), [2.0, 2.0]),
    ],
)
def test_losses_by_hand(name, given, bounds, right):
    assert LOSSES[name](given, bounds) == pytest.approx(right)


def test_selected_tokens_are_treated_apart():
    own = replace(tokens([0.5, 0.5]), selected_T=np.array([True, False]))
    ratio = math.exp(0.5)
    assert LOSSES["kl_cov"](own, Bounds(penalty=0.2)) == pytest.approx([-ratio + 0.1, -ratio])
    assert LOSSES["clip_cov"](own, Bounds()) == pytest.approx([0.0, -1.2])
    found = covariances(np.array([1.0, -1.0, 9.0]), np.array([-1.0, -3.0, 0.0]), np.array([True, True, False]))
    assert found[:2].tolist() == [1.0, 1.0]


def test_what_has_no_gradient_is_held():
    """CISPO's weight stays while log p moves; GSPO's ratio moves with the token alone."""
    own = tokens([math.log(2.0), 0.0])
    moved = replace(own, new_T=own.new_T + 0.1)
    assert LOSSES["cispo"](moved, Bounds(0.5, 0.5)) == pytest.approx([1.35, 0.9])
    mean = 0.5 * math.log(2.0)
    assert LOSSES["gspo"](moved, Bounds(9.0, 9.0)) == pytest.approx([-math.exp(mean + 0.1)] * 2)
