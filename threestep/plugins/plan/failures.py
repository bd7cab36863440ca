"""Seconds that failures, saves and slow nodes add to a run, and the steps between checkpoints that add least.

Failures are independent and equally likely at any time (Poisson). Every one costs the work since the last checkpoint
and a restart. benchmarks/clock/failures.py simulates the same runs event by event.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from threestep.plugins.plan.clock.devices import DEVICES_OF_A_NODE

# Llama 3 (arXiv 2407.21783, table 5): 419 unexpected stops of 16,384 H100 in 54 days.
FAILURES_PER_GPU_HOUR = 419 / (16_384 * 54 * 24)
# 2 TB/s of storage for those 16,384 GPUs (section 3.3.1).
SAVED_GB_PER_SECOND = 2000 / 16_384
# MegaScale (arXiv 2402.15627): about one machine in 200 is 10 % slower, and a failure is found, and its machine
# replaced, within 10 minutes.
SLOW_NODES, SLOWER_BY = 0.005, 0.10
RESTART_SECONDS = 600.0
SAVED_BYTES = 14  # of a trained number: weights in 16 bits, master weights and two moments in 32


class Reliability(NamedTuple):
    """failures: of a GPU in a second. restart_seconds: without the reading of a checkpoint. save_rate: bytes a second
    of one GPU. slow_nodes: share of nodes that are slower by `SLOWER_BY`."""

    failures: float
    restart_seconds: float
    save_rate: float
    slow_nodes: float


class WholeRun(NamedTuple):
    """steps of `seconds` each, at best, on so many GPUs; a checkpoint has `saved_bytes`."""

    steps: int
    seconds: float
    ranks: int
    saved_bytes: float


class Losses(NamedTuple):
    """every: steps between checkpoints. between_failures, save: seconds. slowed, stopped: shares of a run's seconds at
    best, by which slow nodes lengthen it, and then saves, lost work and restarts."""

    every: int
    between_failures: float
    save: float
    slowed: float
    stopped: float


def losses(run: WholeRun, reliability: Reliability) -> Losses:
    """The losses of a run with the steps between checkpoints that lose least."""
    slowed = SLOWER_BY * some_node_is_slow(run.ranks, reliability.slow_nodes)
    slower = run._replace(seconds=run.seconds * (1 + slowed))
    save = run.saved_bytes / (reliability.save_rate * run.ranks)
    mean = 1 / (reliability.failures * run.ranks)
    best = min(daly_seconds(save, mean) / slower.seconds, run.steps)  # without failures: never
    every = min(
        (min(run.steps, max(1, steps)) for steps in (math.floor(best), math.ceil(best))),
        key=lambda steps: expected_seconds(slower, reliability, steps),
    )
    stopped = expected_seconds(slower, reliability, every) / (slower.steps * slower.seconds) - 1
    return Losses(every, mean, save, slowed, (1 + slowed) * stopped)


def some_node_is_slow(ranks: int, slow_nodes: float) -> float:
    """The probability that at least one node of a run is slow; every rank waits for the slowest."""
    return 1 - (1 - slow_nodes) ** -(-ranks // DEVICES_OF_A_NODE)


def daly_seconds(save: float, between_failures: float) -> float:
    """Seconds of work between checkpoints that lose least (Daly 2006, "A higher order estimate of the optimum
    checkpoint interval", eq. 37; its first term is Young's, 1974)."""
    half = save / (2 * between_failures)
    if half >= 1:
        return between_failures
    return math.sqrt(2 * save * between_failures) * (1 + math.sqrt(half) / 3 + half / 9) - save


def expected_seconds(run: WholeRun, reliability: Reliability, every: int) -> float:
    """Seconds of a run that saves `every` so many steps (Daly 2006, eq. 20): a segment of work and its save is begun
    again until no failure falls into it."""
    save = run.saved_bytes / (reliability.save_rate * run.ranks)
    rate = reliability.failures * run.ranks
    restart = reliability.restart_seconds + save  # a checkpoint is read as fast as it was written
    segment = every * run.seconds + save
    if rate * (restart + segment) > 500:
        return math.inf
    return run.steps / every * math.exp(rate * restart) * math.expm1(rate * segment) / rate
