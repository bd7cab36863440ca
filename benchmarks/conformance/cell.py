"""One cell, in the environment of its trainer: the last line that is printed is the cell as JSON.

python -m benchmarks.conformance.cell TRAINER PROPERTY
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from importlib import import_module
from typing import Any

from benchmarks.conformance.field import PROPERTIES, TRAINERS
from benchmarks.conformance.verdicts import NOT_RUN, YES, Cell, answer_of


def main() -> None:
    """Run the properties that are named, and print each."""
    trainer, *names = sys.argv[1:]
    adapter = import_module(f"benchmarks.conformance.adapters.{TRAINERS[trainer].adapter}")
    for name in names:
        cell = see(adapter, name)
        versions = adapter.versions()
        print(json.dumps({"cell": name, **cell.as_dict(), "versions": versions}), flush=True)


def see(adapter: Any, name: str) -> Cell:
    """The cell with the trainer's defaults; where they do not hold, with the settings that its documentation has."""
    known = PROPERTIES[name]
    if name in adapter.LACKS:
        return Cell(NOT_RUN, why=adapter.LACKS[name])
    if not hasattr(adapter, known.kind):
        return Cell(NOT_RUN, why=adapter.LACKS.get(known.kind, f"has no {known.kind}"))
    look = getattr(import_module(f"benchmarks.conformance.properties.{known.kind}"), name)
    run = _runner(adapter, known.kind)
    try:
        sight = look(run, {})
        better = getattr(adapter, "BETTER", {}).get(name)
        if answer_of(sight.views) == YES or better is None:
            return Cell(answer_of(sight.views), sight.views, note=sight.note)
        words, extra = better
        other = look(run, extra)
        return Cell(answer_of(other.views), other.views, words, sight.views, note=other.note)
    except NotImplementedError as lack:
        return Cell(NOT_RUN, why=str(lack))
    except Exception as error:  # noqa: BLE001 - whatever a trainer of another project raises is the finding
        traceback.print_exc()
        return Cell(NOT_RUN, why=f"{type(error).__name__}: {str(error).strip()[-300:]}")


def _runner(adapter: Any, kind: str) -> Any:
    if kind != "sft":
        return getattr(adapter, kind)
    from benchmarks.conformance.running import run_case

    return functools.partial(run_case, adapter)


if __name__ == "__main__":
    main()
