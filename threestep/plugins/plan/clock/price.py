"""The clock's lines of `--dry_run`: seconds by part, hours, money, and the error of all that."""

from __future__ import annotations

from typing import NamedTuple

ERROR = "43 of 48 published speeds of training were within 30 % of this estimate (threestep/plugins/plan/README.md)"
ROLLOUT_ERROR = ", and 5 of 18 whole steps of RL; the others took longer"


class Bill(NamedTuple):
    """steps: of the run; None if no flag bounds them. unit: of what the seconds are."""

    steps: int | None
    unit: str
    ranks: int
    price_per_hour: float | None


def time_lines(parts: dict[str, float], device: str, bill: Bill) -> list[str]:
    """Return a table of seconds, and sentences on hours, money and error. parts: seconds of one unit, all ranks at the
    same time."""
    width = max(map(len, [*parts, f"one {bill.unit}"]))
    total = sum(parts.values())
    rows = [f"  {name:{width}} {seconds:12,.4f}" for name, seconds in [*parts.items(), (f"one {bill.unit}", total)]]
    title = f"seconds of one {bill.unit} on {bill.ranks} x {device}, estimated (threestep/plugins/plan/README.md):"
    steps = bill.steps or 1000
    hours = steps * total / 3600
    bounded = "" if bill.steps else "; --max_train_steps gives those of the run"
    cost = ""
    if bill.price_per_hour is not None:
        cost = f", {hours * bill.ranks * bill.price_per_hour:,.2f} in money at {bill.price_per_hour:g} an hour and rank"
    uncompared = "" if bill.unit == "step" else ROLLOUT_ERROR
    return [
        "\n".join([title, *rows]),
        f"{steps:,} {bill.unit}s: {hours:,.2f} hours, {hours * bill.ranks:,.1f} of devices{cost}{bounded}",
        f"error: {ERROR}{uncompared}; evaluation, saving and loading come on top, and every row is taken to be of full "
        "length",
    ]
