"""The cost of a run on 1 to 4,096 GPUs, and which part of it begins to cost more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from training.plan.search import Tried, missing

if TYPE_CHECKING:
    from training.plan.choices import Wanted

GPUS = tuple(2**power for power in range(13))


class Point(NamedTuple):
    """The best setting on so many GPUs; None, with a sentence, where there is none."""

    ranks: int
    best: Tried | None
    why_none: str = ""

    @property
    def device_seconds(self) -> float:
        """The seconds of all GPUs for one step or rollout."""
        return float("inf") if self.best is None else self.ranks * self.best.seconds


def points(wanted: Wanted, numbers: Sequence[int], find: Callable[[Wanted], list[Tried]]) -> list[Point]:
    """The best on each number of GPUs, by the same batch."""
    found = []
    for ranks in numbers:
        if ranks > wanted.sequences:
            found.append(Point(ranks, None, f"the batch has {wanted.sequences:,} sequences"))
            continue
        here = replace(wanted, ranks=ranks)
        tried = find(here)
        best = next((one for one in tried if one.parts is not None), None)
        found.append(Point(ranks, best, "" if best is not None else missing(tried, here)))
    return found


def limit(point: Point, cheapest: Point) -> str:
    """The part of a step that costs most device seconds more than on the cheapest number of GPUs."""
    if point.best is None:
        return point.why_none
    assert point.best.parts is not None and cheapest.best is not None and cheapest.best.parts is not None
    if point.ranks == cheapest.ranks:
        return "the cheapest"
    before = cheapest.best.parts
    more = {
        name: point.ranks * seconds - cheapest.ranks * before.get(name, 0.0)
        for name, seconds in point.best.parts.items()
    }
    name = max(more, key=lambda part: more[part])
    rise = point.device_seconds / cheapest.device_seconds - 1
    return f"{rise:+.0%}, most by {name}" if rise >= 0.005 else "as cheap"
