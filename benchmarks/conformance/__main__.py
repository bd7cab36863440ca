"""The table of the field: properties of released trainers, each cell by a command.

    python -m benchmarks.conformance --trainer trl-1.16 --property accumulation    one cell
    python -m benchmarks.conformance                    all cells, and docs/lab_book/2026-q4-conformance.md
    python -m benchmarks.conformance --page                                         the page from the results kept

Each trainer runs in its own environment (`python -m benchmarks.conformance.environments` makes them). A property is
seen by two methods at least: "no" is written where two say so, "disputed" where one does. Results are kept as JSON in
benchmarks/conformance/results, a file per trainer, with versions and date; the page is made from them alone. Models,
tokenizer and rows are made on the spot; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.conformance.environments import FOLDER
from benchmarks.conformance.field import PROPERTIES, TRAINERS
from benchmarks.conformance.page import write_page

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
SECONDS = 1800


def main(argv: Sequence[str]) -> int:
    """Run the cells and write the page; 1 if a trainer's process ended by itself."""
    arguments = _arguments(argv)
    code = 0
    if not arguments.page:
        names = arguments.property or list(PROPERTIES)
        for trainer in arguments.trainer or list(TRAINERS):
            fitting = [name for name in names if PROPERTIES[name].kind in TRAINERS[trainer].kinds]
            code |= _run(trainer, fitting, arguments)
    write_page(ROOT / "docs" / "lab_book" / "2026-q4-conformance.md", RESULTS)
    return code


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", nargs="+", choices=list(TRAINERS), metavar="NAME", help=", ".join(TRAINERS))
    parser.add_argument("--property", nargs="+", choices=list(PROPERTIES), metavar="NAME", help=", ".join(PROPERTIES))
    parser.add_argument("--environments", type=Path, default=Path(FOLDER), help="folder of the environments")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page from the results kept")
    parser.add_argument("--show", action="store_true", help="also what the trainers print")
    return parser.parse_args(argv)


def _run(trainer: str, names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Run a trainer's cells in one process of its environment; keeps each as it comes."""
    environment = TRAINERS[trainer].environment
    python = (
        sys.executable if environment == "threestep" else str(arguments.environments / environment / "bin" / "python")
    )
    if not Path(python).exists():
        print(f"{trainer}: no environment {python}; make it: {made_by(environment)}", file=sys.stderr)
        return 1
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "DO_NOT_TRACK": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    command = [python, "-m", "benchmarks.conformance.cell", trainer, *names]
    error = None if arguments.show else subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=error, text=True, env=variables, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"cell"'):
                cell = json.loads(line)
                keep(trainer, cell.pop("cell"), cell)
            elif arguments.show:
                print(line, end="")
    return int(process.returncode != 0)


def made_by(environment: str) -> str:
    """The command that makes an environment."""
    return f"python -m benchmarks.conformance.environments {environment}"


def keep(trainer: str, name: str, cell: dict[str, Any]) -> None:
    """Put a cell among the results of its trainer, with today's date, and print its line."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{trainer}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[name] = {**cell, "date": datetime.date.today().isoformat()}
    ordered = {each: kept[each] for each in PROPERTIES if each in kept}
    path.write_text(json.dumps(ordered, indent=1) + "\n")
    seen = "; ".join(f"{view['method']}: {view['figure']}" for view in cell["views"])
    print(f"{trainer} {name}: {cell['answer']} ({seen or cell['why']})", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
