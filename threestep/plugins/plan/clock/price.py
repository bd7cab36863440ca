"""The clock's lines of `--dry_run`: seconds by part, hours, cost, and how accurate they are."""

from __future__ import annotations

from typing import NamedTuple

ACCURACY = "this estimate was within 30% for 43 of 48 published training speeds (threestep/plugins/plan/README.md)"
ROLLOUT_ACCURACY = " and for 5 of 18 published RL steps; the other 13 took longer"


class Bill(NamedTuple):
    """steps: of the run; None if no flag bounds them. unit: of what the seconds are."""

    steps: int | None
    unit: str
    ranks: int
    price_per_hour: float | None


def time_lines(parts: dict[str, float], device: str, bill: Bill) -> list[str]:
    """Return a table of seconds, and sentences on hours, cost and accuracy. parts: seconds of one unit, all ranks at
    the same time."""
    width = max(map(len, [*parts, f"one {bill.unit}"]))
    total = sum(parts.values())
    rows = [f"  {name:{width}} {seconds:12,.4f}" for name, seconds in [*parts.items(), (f"one {bill.unit}", total)]]
    title = f"seconds of one {bill.unit} on {bill.ranks} x {device}, estimated:"
    steps = bill.steps or 1000
    hours = steps * total / 3600
    bounded = "" if bill.steps else "; give --max_train_steps to see the totals for your run"
    cost = ""
    if bill.price_per_hour is not None:
        cost = f", cost {hours * bill.ranks * bill.price_per_hour:,.2f} at {bill.price_per_hour:g} per hour and rank"
    of_rollouts = "" if bill.unit == "step" else ROLLOUT_ACCURACY
    return [
        "\n".join([title, *rows]),
        f"{steps:,} {bill.unit}s: {hours:,.2f} hours, {hours * bill.ranks:,.1f} device-hours{cost}{bounded}",
        (
            f"accuracy: {ACCURACY}{of_rollouts}; evaluation, saving and loading are not included, and every row is "
            "assumed to be of maximum length"
        ),
    ]
