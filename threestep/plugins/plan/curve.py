"""The cost of a run on 1 to 4,096 GPUs, and which part of it begins to cost more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from threestep.plugins.plan.search import Tried, missing

if TYPE_CHECKING:
    from threestep.plugins.plan.choices import Wanted
    from threestep.plugins.plan.clock.training_step import Parts
    from threestep.plugins.plan.failures import Losses

GPUS = tuple(2**power for power in range(13))
SLOW_NODES, STOPS = "slow nodes", "saves, failures and restarts"
BITES = 0.05  # of what a step costs where it is cheapest


class Point(NamedTuple):
    """The best setting on so many GPUs; None, with a sentence, where there is none."""

    ranks: int
    best: Tried | None
    why_none: str = ""

    @property
    def device_seconds(self) -> float:
        """The seconds of all GPUs for one step or rollout."""
        return float("inf") if self.best is None else self.ranks * self.best.seconds


def points(
    wanted: Wanted,
    numbers: Sequence[int],
    find: Callable[[Wanted], list[Tried]],
    lost: Callable[[int, float], Losses],
) -> list[Point]:
    """The best on each number of GPUs, by the same batch. lost: of so many GPUs and seconds of a step."""
    found = []
    for ranks in numbers:
        if ranks > wanted.sequences:
            found.append(Point(ranks, None, f"the batch has only {wanted.sequences:,} sequences"))
            continue
        here = replace(wanted, ranks=ranks)
        tried = find(here)
        best = next((lengthened(one, lost(ranks, one.seconds)) for one in tried if one.parts is not None), None)
        found.append(Point(ranks, best, "" if best is not None else missing(tried, here)))
    return found


def lengthened(one: Tried, lost: Losses) -> Tried:
    """The setting with the seconds that slow nodes and stops add to each step."""
    assert one.parts is not None
    added = {SLOW_NODES: lost.slowed * one.seconds, STOPS: lost.stopped * one.seconds}
    return one._replace(parts={**one.parts, **added})


def limit(point: Point, cheapest: Point) -> str:
    """The part of a step that costs most device seconds more than on the cheapest number of GPUs."""
    if point.best is None:
        return point.why_none
    if point.ranks == cheapest.ranks:
        return "the cheapest"
    more = _more(point, cheapest)
    name = max(more, key=lambda part: more[part])
    rise = point.device_seconds / cheapest.device_seconds - 1
    return f"{rise:+.0%}, mainly due to {name}" if rise >= 0.005 else "as cheap"


def _more(point: Point, cheapest: Point) -> Parts:
    """Seconds of all GPUs that each part takes more than on the cheapest number."""
    assert point.best is not None and cheapest.best is not None
    parts, before = point.best.parts or {}, cheapest.best.parts or {}
    return {name: point.ranks * seconds - cheapest.ranks * before.get(name, 0.0) for name, seconds in parts.items()}


def bites(found: Sequence[Point], cheapest: Point) -> dict[str, int]:
    """The least number of GPUs above the cheapest from which a part adds `BITES` to what a step costs there."""
    first: dict[str, int] = {}
    for point in found:
        if point.best is None or point.ranks <= cheapest.ranks:
            continue
        for name, seconds in _more(point, cheapest).items():
            if seconds >= BITES * cheapest.device_seconds:
                first.setdefault(name, point.ranks)
    return first
