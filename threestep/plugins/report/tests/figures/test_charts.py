"""Running means, thinning and histograms, by hand."""

from __future__ import annotations

import math

import pytest

from threestep.plugins.report.figures.charts import histogram_of, running_mean, thinned


def test_the_mean_is_over_the_values_around():
    points = [(1, 1.0), (2, 2.0), (3, None), (4, 6.0), (5, 4.0)]
    # at the ends the window has fewer values; the gap is no value
    assert running_mean(points, 3) == [(1, 1.5), (2, 3.0), (4, 4.0), (5, 5.0)]
    assert running_mean(points, 1) == [(1, 1.0), (2, 2.0), (4, 6.0), (5, 4.0)]


def test_thinning_loses_no_spike_and_no_end():
    points = [(step, math.sin(step / 50)) for step in range(10_000)]
    points[777] = (777, 90.0)
    points[5000] = (5000, -90.0)
    points[3000] = (3000, None)
    kept = thinned(points, 800)
    assert len(kept) <= 800
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert points[777] in kept and points[5000] in kept
    assert set(kept) <= set(points) and kept == sorted(kept)
    assert thinned(points[:10], 10) == points[:10]
    assert thinned([(step, None) for step in range(100)], 10)[0] == (0, None)


def test_a_histogram_counts_each_value_once():
    edges, counts = histogram_of([("a", [0.0, 0.1, 1.0]), ("b", [0.5])], bins=4)
    assert edges == pytest.approx((0.0, 0.25, 0.5, 0.75, 1.0))
    assert counts == [("a", (2, 0, 0, 1)), ("b", (0, 0, 1, 0))]  # 1, the greatest, is in the last
    edges, counts = histogram_of([("a", [3.0, 3.0])], bins=2)
    assert edges == (2.5, 3.0, 3.5) and sum(counts[0][1]) == 2
