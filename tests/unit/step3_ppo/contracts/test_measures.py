"""Statistics of numbers that ranks share out among them."""

from __future__ import annotations

import itertools
import math
import statistics
from functools import reduce

import pytest
import torch

from training.step3_ppo.contracts.measures import NOTHING, STATISTICS, Measure, Moments, figures_of, moments, spread

NUMBERS = [3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.5]


@pytest.mark.parametrize("first, second", list(itertools.combinations_with_replacement(range(8), 2)))
def test_any_split_over_ranks_gives_the_same(first, second):
    """Three ranks, some with none."""
    parts = [NUMBERS[:first], NUMBERS[first:second], NUMBERS[second:]]
    measure = Measure(torch.tensor(NUMBERS), {statistic: statistic for statistic in STATISTICS})
    own = [moments([Measure(torch.tensor(part), measure.shows)])[0] for part in parts]
    found = figures_of([measure], [reduce(Moments.joined, own, NOTHING)])
    squares = sum(each**2 for each in NUMBERS)
    assert found == pytest.approx(
        {
            "total": sum(NUMBERS),
            "mean": statistics.fmean(NUMBERS),
            "std": statistics.pstdev(NUMBERS),
            "min": -5.0,
            "max": 9.0,
            "ess": sum(NUMBERS) ** 2 / (7 * squares),
            "chi2": squares / 7 - 1,
        }
    )


def test_nothing_on_any_rank_has_no_figure():
    measures = [Measure(torch.empty(0), spread("a")), Measure(torch.tensor([True, False]), {"mean": "b"})]
    assert figures_of(measures, moments(measures)) == {"b": 0.5}


def test_a_spread_names_four():
    assert spread("x", mean="x") == {"mean": "x", "std": "x_std", "min": "x_min", "max": "x_max"}


def test_equal_numbers_have_no_deviation_by_rounding():
    measure = Measure(torch.full((1000,), 0.1), {"std": "std"})
    assert figures_of([measure], moments([measure]))["std"] == pytest.approx(0, abs=1e-8)
    assert not math.isnan(figures_of([measure], moments([measure]))["std"])


def test_a_small_spread_around_one_is_not_rounded_away():
    """The mean of 300,000 numbers near 1 added up in float32 is off by more than their deviation squared."""
    values = 1 + 1e-4 * torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    found = moments([Measure(values, {})])[0]
    assert STATISTICS["std"](found) == pytest.approx(float(values.double().std()), rel=1e-4)
