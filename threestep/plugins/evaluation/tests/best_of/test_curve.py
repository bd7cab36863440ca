"""The curve by hand, and the sentence on over-optimisation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from threestep.plugins.evaluation.best_of.curve import curve_of, divergence_of_best, over_optimised, picked_of
from training.utils.rewards.figures import best_of


def test_by_hand():
    """Rewards 0, 1, 2 with checks 5, 3, 1: of the three pairs the reward picks 1, 2, 2 with checks 3, 1, 1."""
    one, two, three = curve_of([{"reward": [1.0, 0.0, 2.0], "check": [3.0, 5.0, 1.0]}], seed=1)
    assert [point.k for point in (one, two, three)] == [1, 2, 3]
    assert [point.reward.value for point in (one, two, three)] == pytest.approx([1.0, 5 / 3, 2.0])
    assert [point.check.value for point in (one, two, three)] == pytest.approx([3.0, 5 / 3, 1.0])
    assert [point.best_check.value for point in (one, two, three)] == pytest.approx([3.0, 13 / 3, 5.0])
    assert one.kl == 0.0


def test_it_is_the_mean_of_drawing_k(rounds=4000):
    """Against simulation: k fresh responses, the best of them, from the law that the n were drawn from."""
    draws = np.random.default_rng(1)

    def responses(shape):
        reward = draws.normal(size=shape)
        return reward, -((reward - 1.0) ** 2)  # a checker that is best at a reward of 1

    reward, check = responses((rounds, 8))
    drawn = [{"reward": r, "check": c} for r, c in zip(reward.tolist(), check.tolist(), strict=True)]
    for point in curve_of(drawn, seed=1):
        fresh, its_check = responses((rounds * 10, point.k))
        best = fresh.argmax(axis=1)
        assert point.reward.value == pytest.approx(fresh.max(axis=1).mean(), abs=0.04)
        picked = its_check[np.arange(len(best)), best].mean()
        assert point.check.low - 0.05 < picked < point.check.high + 0.05


def test_a_checker_that_falls_is_said():
    draws = np.random.default_rng(2)
    gamed = [{"reward": (r := draws.normal(size=8)).tolist(), "check": (-r).tolist()} for _ in range(50)]
    honest = [{"reward": row["reward"], "check": row["reward"]} for row in gamed]
    unchecked = [{"reward": row["reward"]} for row in gamed]
    said = over_optimised(gamed, curve_of(gamed, 1), seed=1)
    assert said.startswith("over-optimised: the checker's score of the response that the reward picks changes by -1.")
    assert said.endswith("from n = 1 to n = 8")
    for drawn in (honest, unchecked):
        assert over_optimised(drawn, curve_of(drawn, 1), seed=1) == ""
    assert curve_of(unchecked, 1)[0].check is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_the_pick_of_a_value_is_the_mean_over_all_subsets(seed, k):
    """Ties among the largest of a subset are picked equally often."""
    draws = np.random.default_rng(seed)
    values = draws.integers(0, 3, 6).tolist()
    others = [float(draws.normal()) for _ in range(6)]
    picks = []
    for subset in itertools.combinations(range(6), k):
        best = max(values[i] for i in subset)
        picks.append(np.mean([others[i] for i in subset if values[i] == best]))
    assert picked_of(values, others, k) == pytest.approx(np.mean(picks))
    assert picked_of(others, others, k) == pytest.approx(best_of(others, k))


def test_the_divergence_of_the_best_and_many_responses():
    found = [divergence_of_best(k) for k in (1, 2, 4, 16, 64)]
    assert found == pytest.approx([0.0, 0.193147, 0.636294, 1.835089, 3.174508], abs=1e-6)
    # Of a uniform law, the best of k has the density k u^(k - 1) against 1: the integral of its log.
    u = (np.arange(200_000) + 0.5) / 200_000
    assert np.mean(3 * u**2 * np.log(3 * u**2)) == pytest.approx(divergence_of_best(3), abs=1e-6)
    values = [float(number) for number in range(1200)]
    assert best_of(values, 600) == pytest.approx(600 * 1201 / 601 - 1)
