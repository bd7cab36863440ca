"""Best, worst, majority and pass@k against enumeration of every subset, and intervals against simulation."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from training.utils.rewards.figures import (
    best_of,
    by_source,
    each_prompt,
    majority_of,
    mean,
    ratio,
    several_figures,
    several_of,
    sizes,
    value_names,
    worst_of,
)


def test_by_hand():
    """Four responses with two answers: 0.5 twice ("b"), 2 ("a"), -1 ("c")."""
    values, answers = [0.5, 2.0, 0.5, -1.0], ["b", "a", "b", "c"]
    # Of the six pairs: maxima 2, 0.5, 0.5, 2, 2, 0.5; minima 0.5, 0.5, -1, 0.5, -1, -1.
    assert best_of(values, 2) == pytest.approx(7.5 / 6) and worst_of(values, 2) == pytest.approx(-1.5 / 6)
    # Majorities: b wins one pair with 0.5; the other five are ties: (0.5 + 2)/2 twice, (0.5 - 1)/2 twice, (2 - 1)/2.
    assert majority_of(values, answers, 2) == pytest.approx((0.5 + 2.5 - 0.5 + 0.5) / 6)
    assert [sizes(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_they_are_means_over_all_subsets(seed, k):
    draws = np.random.default_rng(seed)
    answers = draws.integers(0, 3, 6).tolist()
    values = [float(draws.normal()) for _ in range(6)]
    subsets = list(itertools.combinations(range(6), k))
    assert best_of(values, k) == pytest.approx(np.mean([max(values[i] for i in subset) for subset in subsets]))
    assert worst_of(values, k) == pytest.approx(np.mean([min(values[i] for i in subset) for subset in subsets]))
    votes = []
    for subset in subsets:
        counts = Counter(answers[i] for i in subset)
        tied = [answer for answer, count in counts.items() if count == max(counts.values())]
        votes.append(np.mean([np.mean([values[i] for i in subset if answers[i] == answer]) for answer in tied]))
    assert majority_of(values, answers, k) == pytest.approx(np.mean(votes))


@pytest.mark.parametrize("n, c, k", [(5, 2, 3), (8, 1, 4), (8, 7, 2), (6, 0, 3), (6, 6, 6)])
def test_pass_at_k_is_the_unbiased_estimate(n, c, k):
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert best_of([1.0] * c + [0.0] * (n - c), k) == pytest.approx(float(exact))


def test_many_subsets_are_counted():
    """C(20, 10) = 184,756, of which C(11, r) C(9, 10 - r) have r of the eleven; C(64, 32) = 1.8e18."""
    values, answers = [1.0] * 11 + [0.0] * 9, [1] * 11 + [0] * 9
    exact = sum(
        math.comb(11, right) * math.comb(9, 10 - right) * (1.0 if right > 5 else 0.5 if right == 5 else 0.0)
        for right in range(1, 11)
    ) / math.comb(20, 10)
    assert majority_of(values, answers, 10) == pytest.approx(exact, rel=1e-12)
    assert majority_of([2.0] * 64, list(range(64)), 32) == pytest.approx(2.0, rel=1e-12)


def test_names_and_means():
    figures = several_figures([[1.0, 0.0], [1.0, 1.0]], [["x", "y"], ["x", "x"]], seed=0)
    values = {name: figure.value for name, figure in figures.items()}
    assert values == {"mean@2": 0.75, "std@2": 0.25, "best@2": 1.0, "worst@2": 0.5, "majority@2": 0.75}


def test_intervals_cover_the_truth_in_95_of_100_runs():
    """100 evaluations of 60 prompts, 4 responses each, right with a probability of the prompt's own, uniform from 0 to
    1: pass@2 is 1 - E[(1 - p)^2] = 2/3, mean 1/2."""
    draws, covered = np.random.default_rng(0), Counter()
    for run in range(100):
        right = (draws.random((60, 4)) < draws.random((60, 1))).astype(float).tolist()
        figures = several_figures(right, right, seed=run)
        for name, truth in (("best@2", 2 / 3), ("mean@4", 1 / 2), ("worst@2", 1 / 3)):
            covered[name] += figures[name].low <= truth <= figures[name].high
    assert all(90 <= count <= 100 for count in covered.values()), covered


def test_the_bootstrap_of_many_numbers_is_the_normal_interval():
    values = np.random.default_rng(0).normal(2.0, 3.0, 2000)
    figure = mean(values.tolist(), seed=1)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert figure.value == pytest.approx(values.mean())
    assert (figure.low, figure.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)
    assert mean(values.tolist(), seed=1) == figure


def test_a_ratio_is_of_sums():
    """Losses 1 and 9 over 1 and 3 tokens: 10 / 4, and resampled by rows never outside 1/1 .. 9/3."""
    figure = ratio([1.0, 9.0], [1, 3], seed=0)
    assert (figure.value, figure.low, figure.high) == (2.5, 1.0, 3.0)


def sample(prompt: int, response: str, source: str = "a/b", **values: float) -> dict:
    columns = {"data_source": source}
    return {"prompt_index": prompt, "response": response, "columns": columns, "reward": 0.0, "ended": True, **values}


def test_prompts_sources_and_values():
    one = sample(0, "x", **{"reward/rule": 1.0, "reward/rule/key": 2.0, "check": 0.0, "check/answer": 1.0})
    two, three = sample(1, "y", source="c/b"), sample(0, "z")
    assert each_prompt([one, two, three]) == [[one, three], [two]]
    assert value_names([two, one]) == ["reward/rule", "reward/rule/key", "check", "check/answer"]
    assert by_source([one, three]) == {}
    assert by_source([one, two]) == {"a_b": [one], "c_b": [two]}  # whole names, since their ends are equal
    assert set(by_source([one, sample(2, "", source="c d")])) == {"b", "c_d"}


def test_the_weighted_sum_votes_by_the_only_answer_that_a_reward_gives():
    """Texts differ; the rule's answers are 5, 5 and 6."""
    three = [
        sample(0, str(n), **{"reward": value, "reward/rule/answer": answer})
        for n, (value, answer) in enumerate(((1.0, 5.0), (1.0, 5.0), (0.0, 6.0)))
    ]
    assert several_of(three, "reward", 0)["majority@3"].value == 1.0
    others = [{**each, "reward/other/answer": float(n)} for n, each in enumerate(three)]
    assert several_of(others, "reward", 0)["majority@3"].value == 2 / 3  # two of them: by text, each its own
    assert several_of(three[:1], "reward", 0) == {} == several_of(three, "check", 0)
