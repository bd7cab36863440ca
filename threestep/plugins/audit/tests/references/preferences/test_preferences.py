"""Every loss of responses on the hand-worked rows of its docstring, and what the terms share."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from threestep.plugins.audit.references.preferences import (
    LOSSES,
    ResponseSums,
    Term,
    lengths,
    marked,
    ranking,
    schedule,
)

pytestmark = pytest.mark.unit

# One pair of 3 tokens each: w -0.5 -1 -1.5, its reference -0.7 -1.1 -1.6; l -1 -2 -0.5, its reference -0.8 -1.4 -0.7.
SUMS, REFERENCE = np.array([-3.0, -3.5]), np.array([-3.4, -2.9])
PAIR = ResponseSums(SUMS, SUMS, REFERENCE, np.array([3.0, 3.0]), np.array([0]), np.array([1]))
TERM = Term(0.1, gamma=0.5, alpha=0.0)


@pytest.mark.parametrize(
    ("name", "term", "right"),
    [
        ("sigmoid", TERM, 0.644397),
        ("sigmoid_norm", TERM, 0.676619),
        ("robust", replace(TERM, smoothing=0.1), 0.631897),
        ("ipo", TERM, 21.777778),
        ("hinge", TERM, 0.9),
        ("apo_zero", TERM, 0.975006),
        ("apo_down", TERM, 0.985019),
        ("simpo", replace(TERM, beta=2.0), 0.779949),
        ("cpo", TERM, 0.668460),
        ("cpo", replace(TERM, alpha=2.0), 2.668460),
        ("orpo", TERM, 1.057496),
        ("sft", TERM, 1.0),
        ("plackett_luce", TERM, 0.644397),
    ],
)
def test_losses_of_pairs_by_hand(name, term, right):
    assert LOSSES[name](PAIR, term) == pytest.approx([right], abs=1e-6)


def test_marked_responses_by_hand():
    own = replace(PAIR, good_S=np.array([True, False]))
    assert LOSSES["kto"](own, TERM) == pytest.approx([0.490001, 0.485005], abs=1e-6)
    assert LOSSES["kto"](own, replace(TERM, point=0.3)) == pytest.approx([0.497500, 0.477515], abs=1e-6)
    weighted = LOSSES["kto"](own, replace(TERM, weights=(2.0, 3.0)))
    assert weighted == pytest.approx([2 * 0.490001, 3 * 0.485005], abs=1e-5)
    # -log sigmoid(0.04) and -log sigmoid(0.06).
    right = [math.log1p(math.exp(-0.04)), math.log1p(math.exp(-0.06))]
    assert LOSSES["bco"](own, TERM) == pytest.approx(right)


def test_points_of_marked_responses():
    assert [marked.kto_point(np.array(values)) for values in ([-1.0, 3.0], [-3.0, 1.0], [])] == [1.0, 0.0, 0.0]
    assert marked.bco_point(np.array([2.0, -1.0]), np.array([True, False])) == 0.5
    assert marked.bco_point(np.array([2.0, 4.0]), np.array([True, True])) == 3.0


def test_weights_beyond_the_shortest_response():
    """A prompt of responses of 1 and 3 tokens, and one of a single response, after a prompt token each."""
    mask = np.array([False, True, False, True, True, True, False, True, True])
    sequence, prompt = np.array([0, 0, 1, 1, 1, 1, 2, 2, 2]), np.array([4, 4, 9])
    found = lengths.tail_weights(mask, sequence, prompt, np.array([1.0, 3.0, 2.0]), alpha=0.4)
    assert found[mask].tolist() == [1.0, 1.0, 0.4, 0.4, 1.0, 1.0]


def test_a_prompts_likelihood_counts_once():
    """Three ranked responses make three pairs of weight 1/3; the best is chosen in two of them."""
    shares = np.array([1.5, 1.5, 3.0])
    sums, chosen, rejected = np.array([-2.0, -3.0, -4.0]), np.array([0, 0, 1]), np.array([1, 2, 2])
    own = ResponseSums(sums, sums, np.zeros(3), np.ones(3), chosen, rejected, shares)
    assert LOSSES["sft"](own, TERM).sum() / 3 == pytest.approx(2.0)


def test_a_ranking_of_three_by_hand():
    rewards, chosen, rejected = np.array([2.0, 1.0, 0.0]), np.array([0, 0, 1]), np.array([1, 2, 2])
    own = ResponseSums(rewards, rewards, np.zeros(3), np.ones(3), chosen, rejected, np.array([1.5, 1.5, 3.0]))
    found = LOSSES["plackett_luce"](own, TERM) / 3
    assert [found[:2].sum(), found[2]] == pytest.approx([1.001943, 0.644397], abs=1e-6)


@pytest.mark.parametrize(("cosine", "middle"), [(False, 1.5), (True, 1.0 + 2.0 * (0.5 - 0.5 * math.sqrt(0.5)))])
def test_beta_over_the_steps(cosine, middle):
    found = [schedule.beta_at(step, 5, 1.0, 3.0, cosine=cosine) for step in (1, 2, 5)]
    assert found == pytest.approx([1.0, middle, 3.0])


def test_the_ranking_loss_with_its_options():
    one = np.ones(1)
    assert ranking.ranking_loss(one, one, 0 * one) == pytest.approx([math.log(2.0)])
    smoothed = ranking.ranking_loss(2 * one, one, 0.5 * one, smoothing=0.25, centring=0.1)
    right = 0.75 * math.log1p(math.exp(-0.5)) + 0.25 * math.log1p(math.exp(0.5)) + 0.1 * 9.0
    assert smoothed == pytest.approx([right])
