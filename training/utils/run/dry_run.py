"""What `--dry_run` says: the resolved settings, the plan, and a table of memory. Knows no model and no engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import yaml

from training.utils.run.metrics import say

_GIB = 2**30


class Line(Protocol):
    """A row of the table, in bytes of one rank."""

    @property
    def what(self) -> str: ...

    @property
    def device_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...


def ranks_of_dry_run(asked: int | None) -> int:
    """Return how many ranks to plan for: those asked for, else those of the launcher, else one."""
    return asked if asked is not None else int(os.environ.get("WORLD_SIZE", "1"))


def say_plan(program: str, ranks: int, settings: Mapping[str, Any], plan: Sequence[str]) -> None:
    """Say every resolved setting and the sentences of `plan`, on rank 0."""
    text = yaml.safe_dump(dict(settings), sort_keys=True, allow_unicode=True, width=1000)
    say(
        f"dry run of {program} on {ranks} rank{'s' if ranks > 1 else ''}: nothing is loaded, trained or written",
        _main(),
    )
    say("settings:\n" + "".join(f"  {line}\n" for line in text.splitlines()), _main())
    for sentence in plan:
        say(sentence, _main())


def say_memory(lines: Sequence[Line], peaks: Sequence[Line]) -> None:
    """Say the table of memory of one rank, its largest lines' sums (`peaks`) below it."""
    rows = [(line.what, _gib(line.device_bytes), _gib(line.host_bytes)) for line in lines if _holds(line)]
    sums = [(line.what, _gib(line.device_bytes), _gib(line.host_bytes)) for line in peaks]
    width = max(len(what) for what, _, _ in [*rows, *sums])
    table = [f"  {'':{width}} {'device':>10} {'host':>10}"]
    table += [f"  {what:{width}} {device:>10} {host:>10}" for what, device, host in rows]
    table += ["  " + "-" * (width + 22)]
    table += [f"  {what:{width}} {device:>10} {host:>10}" for what, device, host in sums]
    say("memory of one rank, estimated, in GiB (docs/scale.md):\n" + "\n".join(table), _main())


def _holds(line: Line) -> bool:
    return line.device_bytes > 0 or line.host_bytes > 0


def _gib(amount: int) -> str:
    return "-" if amount == 0 else f"{amount / _GIB:,.3f}" if amount < 10 * _GIB else f"{amount / _GIB:,.1f}"


def _main() -> bool:
    return os.environ.get("RANK", "0") == "0"
