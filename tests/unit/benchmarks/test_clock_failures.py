"""Simulated failures beside the formulas of a plan."""

from __future__ import annotations

import random

import pytest

from benchmarks.clock.failures import PUBLISHED, intervals, line, mean_seconds, simulated_seconds
from threestep.plugins.plan.failures import WholeRun, losses

RUN = WholeRun(5_000, 15.0, 4_096, 14 * 70e9)


def test_a_simulated_run_takes_what_is_expected():
    lost = losses(RUN, PUBLISHED)
    expected = RUN.steps * RUN.seconds * (1 + lost.slowed + lost.stopped)
    assert mean_seconds(RUN, PUBLISHED, lost.every, 40) == pytest.approx(expected, rel=0.02)


def test_no_interval_around_is_better():
    lost = losses(RUN, PUBLISHED)
    for every in (lost.every // 4, 4 * lost.every):
        assert mean_seconds(RUN, PUBLISHED, every, 20) > mean_seconds(RUN, PUBLISHED, lost.every, 20)


def test_without_failures_only_saves_are_added():
    sure = PUBLISHED._replace(failures=1e-15, slow_nodes=0.0)
    save = RUN.saved_bytes / (sure.save_rate * RUN.ranks)
    assert simulated_seconds(RUN, sure, 100, random.Random(1)) == pytest.approx(75_000 + 50 * save)


def test_a_line():
    assert line(RUN._replace(steps=100, ranks=8), PUBLISHED, 2).startswith("    8   6,334.6  1003.5    100;")
    assert intervals(4, 6) == [1, 2, 3, 4, 6]
