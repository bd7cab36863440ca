"""The clock of `--dry_run` beside published speeds: predicted over published, row by row.

    python -m benchmarks.clock
    python -m benchmarks.clock --measure cpu.json    (a device for --device cpu.json)

One constant was chosen by looking at rows, the share of their rates that kernels reach in a training step. Each row is
judged with the median of the rows of all other sources, not with its own. Prints every ratio, how many are within 30 %,
and how often the faster of two settings is the faster one; then seconds of steps of RL.
The lab book explains misses.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.clock.drawing import with_drawing
from benchmarks.clock.gloo import gloo_gb_per_second
from benchmarks.clock.predicted import predicted_parts, predicted_rate
from benchmarks.clock.rl_predicted import rollout_parts_of
from benchmarks.clock.rl_rows import published_rollouts
from benchmarks.clock.rows import Row, published_rows
from threestep.plugins.plan.dry_run.cpu_rates import measured_cpu

if TYPE_CHECKING:
    from benchmarks.clock.rl_rows import RolloutRow
    from threestep.plugins.plan.clock.training_step import Parts

WITHIN = 0.30
_ALIKE = 0.05  # published speeds that differ by less are no choice


def main() -> None:
    """Predict every row, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="FILE.json", help="measure this CPU, write it, and end")
    measure = parser.parse_args().measure
    if measure:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        cpu = with_drawing(measured_cpu())
        linked = replace(cpu, links=cpu.links._replace(within=gloo_gb_per_second()))
        Path(measure).write_text(linked.as_json(), "utf-8")
        return
    rows = published_rows()
    shares = {source: share_without(rows, source) for source in sorted({row.source for row in rows})}
    print("share of their rates that kernels reach, by the other sources: " + str(shares))
    rates = [predicted_rate(row, shares[row.source]) for row in rows]
    for row, rate in zip(rows, rates, strict=True):
        parts = predicted_parts(row, shares[row.source])
        print(f"{row.name:52} {row.published:8,.0f} {rate:8,.0f} {rate / row.published:5.2f}  {_most(parts)}")
    close = sum(abs(rate / row.published - 1) <= WITHIN for row, rate in zip(rows, rates, strict=True))
    right, choices = ranked(rows, rates)
    print(f"within {WITHIN:.0%}: {close} of {len(rows)} rows; the faster of two: right in {right} of {choices}")
    print_rollouts(published_rollouts(), share_without(rows, "none of the sources"))


def print_rollouts(rows: Sequence[RolloutRow], share: float) -> None:
    """Print steps of RL, published and predicted seconds, with the share of all sources of training."""
    close = 0
    for row in rows:
        parts = rollout_parts_of(row, share)
        seconds = sum(parts.values())
        close += abs(seconds / row.seconds - 1) <= WITHIN
        print(f"{row.name:52} {row.seconds:8,.1f} {seconds:8,.1f} {seconds / row.seconds:5.2f}  {_most(parts)}")
    print(f"within {WITHIN:.0%}: {close} of {len(rows)} steps of RL")


def _most(parts: Parts) -> str:
    most = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {spent / sum(parts.values()):.0%}" for name, spent in most)


def share_without(rows: Sequence[Row], source: str) -> float:
    """The median share that makes the rows of other sources right; each source counts as one."""
    medians = []
    for other in sorted({row.source for row in rows} - {source}):
        ratios = [row.published / predicted_rate(row, 1.0) for row in rows if row.source == other]
        medians.append(statistics.median(ratios))
    return round(statistics.median(medians), 3)


def ranked(rows: Sequence[Row], rates: Sequence[float]) -> tuple[int, int]:
    """(right, all) choices between two settings, of one source, for the same model and device or the same settings."""
    right = choices = 0
    for (one, first), (other, second) in combinations(zip(rows, rates, strict=True), 2):
        same = one.source == other.source and one.model == other.model
        if same and abs(one.published / other.published - 1) > _ALIKE:
            choices += 1
            right += (one.published > other.published) == (first > second)
    return right, choices


if __name__ == "__main__":
    main()
