"""Failures, saves and slow nodes of a run."""

from __future__ import annotations

import math

import pytest

from threestep.plugins.plan.failures import (
    FAILURES_PER_GPU_HOUR,
    SLOWER_BY,
    Reliability,
    WholeRun,
    daly_seconds,
    expected_seconds,
    losses,
    some_node_is_slow,
)

# A failure of a GPU in 1e6 seconds, restarts of 300, a gigabyte a second of each GPU.
SURE = Reliability(1e-6, 300.0, 1e9, 0.0)
RUN = WholeRun(10_000, 10.0, 100, 3e12)  # a failure every 10,000 s; saves of 30 s


def test_llama_3_failed_every_three_hours():
    assert 1 / (16_384 * FAILURES_PER_GPU_HOUR) == pytest.approx(3.09, abs=0.01)


def test_dalys_interval_is_youngs_less_a_save_where_saves_are_short():
    """sqrt(2 x 30 x 10,000) = 774.6; times 1 + sqrt(0.0015) / 3 + 0.0015 / 9, less 30."""
    assert daly_seconds(30.0, 1e4) == pytest.approx(774.597 * (1 + 0.038730 / 3 + 0.0015 / 9) - 30, abs=1e-2)
    assert daly_seconds(3e4, 1e4) == 1e4


def test_the_interval_is_the_best_of_all():
    """Every number of steps between checkpoints, by the expectation written as Daly (2006) has it, equation 20."""
    mean, save = 1e4, 30.0

    def seconds(every: int) -> float:
        segments = RUN.steps / every
        return mean * math.exp((300.0 + save) / mean) * (math.exp((every * 10.0 + save) / mean) - 1) * segments

    lost = losses(RUN, SURE)
    assert lost.every == min(range(1, 1000), key=seconds) and lost.save == save and lost.between_failures == mean
    assert lost.stopped == pytest.approx(seconds(lost.every) / 1e5 - 1) and lost.slowed == 0
    assert losses(RUN._replace(steps=50), SURE).every == 50


def test_without_failures_a_run_takes_its_steps_and_saves():
    rare = SURE._replace(failures=1e-15)
    assert expected_seconds(RUN, rare, 100) == pytest.approx(1e5 + 100 * 30.0, rel=1e-6)
    assert losses(RUN, rare).every == RUN.steps
    assert expected_seconds(RUN, SURE._replace(failures=1.0), 100) == math.inf


def test_the_slowest_of_all_nodes_slows_the_run():
    """13 nodes of 100 GPUs, one in ten slow."""
    assert some_node_is_slow(100, 0.1) == pytest.approx(1 - 0.9**13) and some_node_is_slow(4, 0.1) == pytest.approx(0.1)
    assert losses(RUN, SURE._replace(slow_nodes=0.1)).slowed == pytest.approx(SLOWER_BY * (1 - 0.9**13))
