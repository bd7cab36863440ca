"""What `--dry_run` prints: the resolved settings, the plan, and a table of memory. Knows no model and no engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from training.utils.run.console import log, started_as_main_rank

_GIB = 2**30


@dataclass(frozen=True)
class MemoryLine:
    """A row of the table, in bytes of one rank: on its device (GPU, or the CPU that it trains on), and on the host."""

    name: str
    device_bytes: int
    host_bytes: int = 0


def ranks_of_dry_run(given: int | None) -> int:
    """The number of ranks to plan for: the flag's, or the launcher's, or one."""
    return given if given is not None else int(os.environ.get("WORLD_SIZE", "1"))


def peak(held: Sequence[MemoryLine], extra_bytes: int, name: str = "most at once") -> MemoryLine:
    """The sum of `held`, with `extra_bytes` on the device."""
    device = sum(line.device_bytes for line in held) + extra_bytes
    return MemoryLine(name, device, sum(line.host_bytes for line in held))


def print_plan(program: str, ranks: int, settings: Mapping[str, Any], plan: Sequence[str]) -> None:
    """Print every resolved setting and the sentences of `plan`, on rank 0."""
    text = yaml.safe_dump(dict(settings), sort_keys=True, allow_unicode=True, width=1000)
    for sentence in (
        f"dry run of {program} on {ranks} rank{'s' if ranks > 1 else ''}: nothing is loaded, trained or written",
        "settings:\n" + "".join(f"  {line}\n" for line in text.splitlines()),
        *plan,
    ):
        log(sentence, started_as_main_rank())


def print_memory(lines: Sequence[MemoryLine], peaks: Sequence[MemoryLine]) -> None:
    """Print the table of memory of one rank, with `peaks` below it. Lines without bytes are left out."""
    lines = [line for line in lines if line.device_bytes > 0 or line.host_bytes > 0]
    width = max(len(line.name) for line in [*lines, *peaks])
    table = [f"  {'':{width}} {'device':>10} {'host':>10}"]
    table += [_row(line, width) for line in lines]
    table += ["  " + "-" * (width + 22)]
    table += [_row(line, width) for line in peaks]
    log("memory of one rank, estimated, in GiB (docs/scale.md):\n" + "\n".join(table), started_as_main_rank())


def _row(line: MemoryLine, width: int) -> str:
    return f"  {line.name:{width}} {_gib(line.device_bytes):>10} {_gib(line.host_bytes):>10}"


def _gib(amount: int) -> str:
    return "-" if amount == 0 else f"{amount / _GIB:,.3f}" if amount < 10 * _GIB else f"{amount / _GIB:,.1f}"
