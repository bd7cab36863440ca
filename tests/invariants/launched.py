"""Launched on every rank: does there what a test module says, its `on_ranks` or another of its functions.

Arguments: MODULE or MODULE.FUNCTION, the folder of the models, one for what the run leaves, "long" for every case
instead of the ordinary ones, and what the test asks for as JSON. The function is called with (ranks, models, out,
is_long, **asked); what it returns is reported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


def each_case(every: Mapping[int, Iterable[str]], ordinary: Mapping[int, Collection[str]]) -> list[Any]:
    """(number of ranks, case) of every case, those marked `long` that are not ordinary."""
    return [
        pytest.param(size, case, marks=[] if case in ordinary.get(size, ()) else [pytest.mark.long])
        for size, cases in every.items()
        for case in cases
    ]


def main(name: str, models: str, out: str, form: str, asked: str) -> None:
    from tests.distributed.launch import report
    from training.utils.engine.ranks.startup import started_process_group

    module, _, function = name.partition(".")
    act = getattr(import_module(f"tests.invariants.{module}"), function or "on_ranks")
    with started_process_group() as ranks:
        report(act(ranks, Path(models), Path(out), form == "long", **json.loads(asked)))


if __name__ == "__main__":
    main(*sys.argv[1:])
