"""A plan as text: the best settings with reasons, the curve of cost, and the YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import yaml

from threestep.plugins.plan.choices import Choice
from threestep.plugins.plan.curve import BITES, Point, bites, limit
from threestep.plugins.plan.search import GIB, Tried

if TYPE_CHECKING:
    from threestep.plugins.plan.clock.training_step import Parts
    from threestep.plugins.plan.failures import Losses

_MOST_PARTS = 3  # that a sentence names


class Terms(NamedTuple):
    """unit: of which the seconds are, step or rollout. units: so many in a run. price_per_hour: of a GPU; None:
    no money is printed."""

    device: str
    unit: str
    units: int
    price_per_hour: float | None = None

    def cost(self, seconds: float, ranks: int) -> str:
        """Hours, GPU-hours and money of a run."""
        hours = self.units * seconds / 3600
        money = "" if self.price_per_hour is None else f", cost {hours * ranks * self.price_per_hour:,.2f}"
        return f"{hours:,.2f} hours, {hours * ranks:,.1f} GPU-hours{money}"


def best_lines(best: Sequence[Tried], tried: Sequence[Tried], ranks: int, terms: Terms) -> list[str]:
    """The best settings, each with its memory, its cost and why it stands there."""
    lines = []
    for place, one in enumerate(best, start=1):
        lines += [
            f"{place}. {one.choice.words}: {one.seconds:,.3f} s per {terms.unit}",
            f"   {terms.cost(one.seconds, ranks)} for {terms.units:,} {terms.unit}s",
            f"   a rank holds {_memory(one)}; largest shares of time: {_largest(one)}",
        ]
        if place == 1:
            lines += [f"   {reason}" for reason in reasons(one, tried)]
        else:
            lines.append(f"   {_later(one, best[0])}")
    return lines


def reasons(best: Tried, tried: Sequence[Tried]) -> Iterator[str]:
    """A line for each setting of the best: what another value of it alone would do, or, if it was not tried alone, the
    fastest with another value."""
    for field in Choice._fields:
        alone = [one for one in tried if _differ(one.choice, best.choice) == [field]]
        others = alone or [one for one in tried if field in _differ(one.choice, best.choice)]
        if not others:
            continue
        other = min(others, key=lambda one: (one.seconds, one.memory.device_bytes))
        words = _words(field, other.choice) if alone else other.choice.words
        done = f"does not fit, {_memory(other)}" if other.parts is None else _later(other, best)
        yield f"with {words}: {done}"


def _words(field: str, choice: Choice) -> str:
    if field == "micro_batch":
        return f"micro-batches of {choice.micro_batch}"
    if field == "zero_stage":
        return f"ZeRO-{choice.zero_stage}"
    if field == "drawing":
        return choice.drawing.name if choice.drawing is not None else "no drawing"
    name = {"offload": "offload", "recompute": "recomputation"}[field]
    return name if getattr(choice, field) else f"no {name}"


def _memory(one: Tried) -> str:
    host = f" and {one.memory.host_bytes / GIB:,.1f} of host memory" if one.memory.host_bytes else ""
    return f"{one.memory.device_bytes / GIB:,.1f} GiB{host}"


def _differ(one: Choice, other: Choice) -> list[str]:
    return [name for name in Choice._fields if getattr(one, name) != getattr(other, name)]


def _largest(one: Tried) -> str:
    assert one.parts is not None
    most = sorted(one.parts.items(), key=lambda part: -part[1])[:_MOST_PARTS]
    return ", ".join(f"{name} {seconds / one.seconds:.0%}" for name, seconds in most)


def _later(one: Tried, best: Tried) -> str:
    """The seconds more, and the part that adds most of them."""
    assert one.parts is not None and best.parts is not None
    more = _more(one.parts, best.parts)
    name = max(more, key=lambda part: more[part])
    slower = one.seconds - best.seconds
    return f"{slower:,.3f} s slower, mainly due to {name} ({more[name]:+,.3f} s)" if slower > 0 else "as fast"


def _more(parts: Parts, others: Parts) -> Parts:
    return {name: parts.get(name, 0.0) - others.get(name, 0.0) for name in [*parts, *others]}


def curve_lines(points: Sequence[Point], terms: Terms) -> list[str]:
    """A row for each number of GPUs."""
    found = [point for point in points if point.best is not None]
    if not found:
        return []
    cheapest = min(found, key=lambda point: point.device_seconds)
    run = f"{terms.units:,} {terms.unit}s with the same batch"
    lines = [f"cost by number of GPUs, {run}, including slow nodes and failures:"]
    for point in points:
        start = f"  {point.ranks:5,} x {terms.device}: "
        if point.best is None:
            lines.append(start + point.why_none)
        else:
            cost = terms.cost(point.best.seconds, point.ranks)
            lines.append(f"{start}{cost}; {point.best.choice.words}; {limit(point, cheapest)}")
    begin = [f"{name} from {ranks:,} GPUs on" for name, ranks in bites(found, cheapest).items()]
    larger = next((point for point in points if point.ranks > found[-1].ranks), None)
    begin += [] if larger is None else [f"from {larger.ranks:,} on {larger.why_none}"]
    if begin:
        lines.append(f"  limits, each listed where it first adds {BITES:.0%} to the cost: {'; '.join(begin)}")
    return lines


def losses_line(lost: Losses, terms: Terms, seconds: float, ranks: int) -> str:
    """The sentence on failures and checkpoints of a run; seconds: of a unit without them."""
    every = f"every {lost.every:,} {terms.unit}s" if lost.every < terms.units else "none before the end"
    cost = terms.cost(seconds * (1 + lost.slowed + lost.stopped), ranks)
    return (
        f"checkpoints: {every}, {lost.save:,.0f} s each; a failure every {lost.between_failures / 3600:,.1f} "
        f"hours. Slow nodes add {lost.slowed:.1%}; saves, failures and restarts add {lost.stopped:.1%}: {cost}"
    )


def as_yaml(best: Tried, command: str) -> str:
    """The file of the best setting, with the command that takes it."""
    head = f"# By `threestep plan`: {best.choice.words}.\n#   {command}\n"
    return head + yaml.safe_dump(best.settings, sort_keys=False, allow_unicode=True, width=1000)
