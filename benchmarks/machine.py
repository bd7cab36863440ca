"""What else the machine does while a run is timed: others' share of the cores, and steal, from /proc/stat.

Knows no competitor. The run's own time is that of this process and of all its ended children (times(2)), so it is read
after the run was waited for. The kernel's own threads count as others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
# Of all cores. A quiet machine of two cores shows under 1 %; a process that takes one of them shows 50 %.
MOST_DISTURBED = 0.05
# Fewer undisturbed rounds carry no claim.
LEAST_ROUNDS = 3


class Counters(NamedTuple):
    """CPU seconds since the machine started, summed over its cores: in all, busy, and stolen by other virtual machines;
    own: of this process and its ended children."""

    total: float
    busy: float
    stolen: float
    own: float


class Load(NamedTuple):
    """Shares of all cores' time in a run, 0 to 1: what other processes used, and what was stolen."""

    others: float
    stolen: float

    def __str__(self) -> str:
        return f"others {100 * self.others:.1f} % of the cores, steal {100 * self.stolen:.1f} %"


def read_counters(stat: Path = STAT) -> Counters | None:
    """Return the counters now; None where the system has no such file."""
    own = sum(os.times()[:4])
    try:
        line = stat.read_text().splitlines()[0]
    except FileNotFoundError:
        return None
    # proc_stat(5): user nice system idle iowait irq softirq steal; the guests that follow are within user and nice.
    user, nice, system, idle, waiting, irq, softirq, stolen = (
        int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in line.split()[1:9]
    )
    busy = user + nice + system + irq + softirq
    return Counters(busy + idle + waiting + stolen, busy, stolen, own)


def load_between(before: Counters | None, after: Counters | None) -> Load | None:
    """Return the load of the time between two readings; None where there are none."""
    if before is None or after is None or after.total <= before.total:
        return None
    total = after.total - before.total
    # Ticks are sampled, own time is measured: the difference may fall below zero by a tick.
    others = max(after.busy - before.busy - (after.own - before.own), 0.0)
    return Load(others / total, (after.stolen - before.stolen) / total)


def is_disturbed(load: Load | None, most: float) -> bool:
    """Whether others and steal together took more than the share `most`. An unknown load is no disturbance."""
    return load is not None and load.others + load.stolen > most


def undisturbed(rounds: Sequence[Sequence[Load | None]], most: float) -> list[int]:
    """Return the indices of the rounds in which no run was disturbed: competitors are compared within rounds."""
    return [index for index, loads in enumerate(rounds) if not any(is_disturbed(load, most) for load in loads)]


def closing_line(rounds: Sequence[Sequence[Load | None]], most: float) -> str:
    """Say how many rounds were undisturbed, and whether that is enough for a claim."""
    if any(load is None for loads in rounds for load in loads):
        return f"nothing is claimed: there is no {STAT} here that says what else the machine did"
    count = len(undisturbed(rounds, most))
    told = f"{count} of {len(rounds)} rounds undisturbed (others and steal at most {100 * most:g} % of the cores)"
    if count >= LEAST_ROUNDS:
        return told
    return f"{told}: nothing is claimed, which takes {LEAST_ROUNDS}"
