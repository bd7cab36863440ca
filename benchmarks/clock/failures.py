"""Simulated runs with failures and slow nodes beside the formulas of `threestep plan`, on 1 to 4,096 GPUs.

    python -m benchmarks.clock.failures

A run goes event by event: exponential times to the next failure, which costs what was not saved and a restart in which
the next one may fall; the failed node's successor is slow or not. For every number of GPUs, the seconds of the interval
that a plan takes, expected and simulated, and the best interval that the simulation finds.
threestep/plugins/plan/README.md.
"""

from __future__ import annotations

import argparse
import math
import random

from threestep.plugins.plan.clock.devices import DEVICES_OF_A_NODE
from threestep.plugins.plan.curve import GPUS
from threestep.plugins.plan.failures import (
    FAILURES_PER_GPU_HOUR,
    RESTART_SECONDS,
    SAVED_BYTES,
    SAVED_GB_PER_SECOND,
    SLOW_NODES,
    SLOWER_BY,
    Reliability,
    WholeRun,
    losses,
)

PUBLISHED = Reliability(FAILURES_PER_GPU_HOUR / 3600, RESTART_SECONDS, 1e9 * SAVED_GB_PER_SECOND, SLOW_NODES)
_FACTORS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)  # of the plan's interval


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--weights", type=float, default=70e9)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a step, on any number of GPUs")
    flags = parser.parse_args()
    print("GPUs, MTBF h, save s, steps between saves; run h at best, expected, simulated; best interval simulated")
    for ranks in GPUS:
        run = WholeRun(flags.steps, flags.seconds, ranks, SAVED_BYTES * flags.weights)
        print(line(run, PUBLISHED, flags.runs))


def line(run: WholeRun, reliability: Reliability, runs: int) -> str:
    """The row of one number of GPUs."""
    lost = losses(run, reliability)
    best_hours = run.steps * run.seconds / 3600
    expected = best_hours * (1 + lost.slowed + lost.stopped)
    found = {every: mean_seconds(run, reliability, every, runs) / 3600 for every in intervals(lost.every, run.steps)}
    best = min(found, key=lambda every: found[every])
    return (
        f"{run.ranks:5,} {lost.between_failures / 3600:9,.1f} {lost.save:7.1f} {lost.every:6,}; {best_hours:9,.1f} "
        f"{expected:9,.1f} {found[lost.every]:9,.1f} ({found[lost.every] / expected:.3f}); {best:6,} "
        f"({found[best] / found[lost.every] - 1:+.2%})"
    )


def intervals(every: int, steps: int) -> list[int]:
    """Intervals around one, in ascending order."""
    return sorted({min(steps, max(1, round(every * factor))) for factor in _FACTORS})


def mean_seconds(run: WholeRun, reliability: Reliability, every: int, runs: int) -> float:
    """The mean of simulated runs, the same dice for every interval."""
    return sum(simulated_seconds(run, reliability, every, random.Random(seed)) for seed in range(runs)) / runs


def simulated_seconds(run: WholeRun, reliability: Reliability, every: int, dice: random.Random) -> float:
    """Seconds of one run."""
    nodes = -(-run.ranks // DEVICES_OF_A_NODE)
    slow = [dice.random() < reliability.slow_nodes for _ in range(nodes)]
    save = run.saved_bytes / (reliability.save_rate * run.ranks)
    rate = reliability.failures * run.ranks
    left, spent = run.steps / every, 0.0
    while True:
        segment = every * run.seconds * (1 + SLOWER_BY * any(slow)) + save
        until_failure = dice.expovariate(rate)
        if until_failure >= left * segment:
            return spent + left * segment
        left -= math.floor(until_failure / segment)
        spent += until_failure
        restart = reliability.restart_seconds + save
        while (failed_again := dice.expovariate(rate)) < restart:
            spent += failed_again
        spent += restart
        slow[dice.randrange(nodes)] = dice.random() < reliability.slow_nodes


if __name__ == "__main__":
    main()
