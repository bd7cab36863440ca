"""The output of `--dry_run`: the resolved settings, the plan, and a table of memory. Knows no model and no engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from training.utils.base.console import log_on_main
from training.utils.base.machine import MemoryLine

if TYPE_CHECKING:
    from training.utils.base.machine import Moment

_GIB = 2**30
_MOST = "most at once"


def ranks_of_dry_run(given: int | None) -> int:
    """The number of ranks to plan for: the flag's, or the launcher's, or one."""
    return given if given is not None else int(os.environ.get("WORLD_SIZE", "1"))


def total(lines: Sequence[MemoryLine], name: str) -> MemoryLine:
    """The sum of `lines`, under `name`."""
    device, host = sum(line.device_bytes for line in lines), sum(line.host_bytes for line in lines)
    return MemoryLine(name, device, host)


def most_at_once(held: Sequence[MemoryLine], moments: Sequence[Moment]) -> list[MemoryLine]:
    """The sum of `held` and of each moment's lines, in the moments' order."""
    return [total([*held, *moment.lines], f"{_MOST}, {moment.doing}") for moment in moments]


def print_plan(program: str, ranks: int, settings: Mapping[str, Any], plan: Sequence[str]) -> None:
    """Print every resolved setting and the sentences of `plan`, on rank 0."""
    text = yaml.safe_dump(dict(settings), sort_keys=True, allow_unicode=True, width=1000)
    for sentence in (
        f"dry run of {program} on {ranks} rank{'s' if ranks > 1 else ''}: nothing is loaded, trained or written",
        "settings:\n" + "".join(f"  {line}\n" for line in text.splitlines()),
        *plan,
    ):
        log_on_main(sentence)


def print_memory(
    held: Sequence[MemoryLine], moments: Sequence[Moment], verdict: Callable[[int], str | None] = lambda most: None
) -> None:
    """Print the table of memory of one rank: the permanent part, then each moment's part and sum, and the largest of
    them. Lines without bytes are left out. verdict: returns a sentence on the most bytes on the device."""
    sums = most_at_once(held, moments)
    largest = MemoryLine(_MOST, max(one.device_bytes for one in sums), max(one.host_bytes for one in sums))
    table: list[MemoryLine | None] = [*_shown(held), total(held, "total held throughout"), None]
    for moment, reached in zip(moments, sums, strict=True):
        table += [*(replace(line, name=f"+ {line.name}") for line in _shown(moment.lines)), reached, None]
    table.append(largest)
    width = max(len(line.name) for line in table if line is not None)
    rule = "  " + "-" * (width + 22)
    rows = [rule if line is None else _row(line, width) for line in table]
    title = "estimated memory per rank, in GiB:"
    log_on_main("\n".join([title, f"  {'':{width}} {'device':>10} {'host':>10}", *rows]))
    sentence = verdict(largest.device_bytes)
    if sentence is not None:
        log_on_main(sentence)


def _shown(lines: Sequence[MemoryLine]) -> list[MemoryLine]:
    return [line for line in lines if line.device_bytes > 0 or line.host_bytes > 0]


def _row(line: MemoryLine, width: int) -> str:
    return f"  {line.name:{width}} {_gib(line.device_bytes):>10} {_gib(line.host_bytes):>10}"


def _gib(amount: int) -> str:
    return "-" if amount == 0 else f"{amount / _GIB:,.3f}" if amount < 10 * _GIB else f"{amount / _GIB:,.1f}"
