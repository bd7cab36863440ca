"""What opening a cached split costs, for 1,000 rows and for 1,000,000: seconds; resident memory, three rows and the
lengths of all included; bytes a token.

    python -m benchmarks.competitors.opening --folder DIR [--rows 1000]

Without `--rows`: makes both splits (rows of 163 tokens, as GSM8K's have on average), opens each in processes of its
own, prints one line, and removes them. With it: opens that one and prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from training.utils.contracts.rows import SentenceRow
from training.utils.data.cache.cache import open_or_build
from training.utils.data.rows.dataset import join_files, write_rows

SIZES = (1_000, 1_000_000)
ROUNDS = 5


def main() -> None:
    """Make both and measure, or open one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--rows", type=int)
    arguments = parser.parse_args()
    folder = Path(arguments.folder)
    if arguments.rows is None:
        print(measure(folder))
    else:
        print(json.dumps(_open(folder, arguments.rows)))


def measure(folder: Path) -> str:
    """One line: seconds and resident bytes of each size, medians over processes that take turns."""
    shutil.rmtree(folder, ignore_errors=True)
    stored = {rows: _ask(folder, rows)[0] for rows in SIZES}
    figures: dict[int, list[dict[str, Any]]] = {rows: [] for rows in SIZES}
    for _ in range(ROUNDS):
        for rows in SIZES:
            command = [sys.executable, "-m", __spec__.name, "--folder", str(folder), "--rows", str(rows)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            figures[rows].append(json.loads(done.stdout))
    shutil.rmtree(folder)
    parts = []
    for rows, many in figures.items():
        seconds = statistics.median(each["seconds"] for each in many)
        extra = statistics.median(each["extra_bytes"] for each in many)
        split = stored[rows]["splits"]["train"]
        parts.append(
            f"{rows:,} rows open in {seconds * 1000:.1f} ms with {extra / 1e6:.1f} MB of extra resident memory, "
            f"{split['bytes'] / split['tokens']:.2f} bytes a token on disk"
        )
    return "; ".join(parts)


def _ask(folder: Path, rows: int) -> tuple[dict[str, Any], Any]:
    """The manifest and the split, made where it is missing."""

    def build(where: str) -> dict[str, Any]:
        source = np.random.RandomState(0)
        part = os.path.join(where, "part.arrow")

        def sentence(row: int) -> SentenceRow:
            length = 163 + source.randint(-100, 101)
            loss_mask = np.arange(length) >= length // 2
            return SentenceRow(row, source.randint(0, 8192, length).astype(np.int32), loss_mask)

        one = write_rows(part, SentenceRow, map(sentence, range(min(rows, 1000))))
        written = join_files([part] * (rows // one.rows), os.path.join(where, "train.arrow"), SentenceRow)
        os.remove(part)
        return {"splits": {"train": asdict(written)}}

    opened = open_or_build(str(folder), "phase1", {"datasets": str(rows)}, build, rebuild=False, log=lambda line: None)
    return opened.manifest, opened.splits["train"]


def _open(folder: Path, rows: int) -> dict[str, Any]:
    before, started = _resident_bytes(), time.perf_counter()
    _, split = _ask(folder, rows)
    seconds = time.perf_counter() - started
    assert [len(split[place].input_ids) > 0 for place in (0, rows // 2, -1)] == [True] * 3 and len(split) == rows
    assert len(split.lengths) == rows  # what a planner asks for
    return {"seconds": seconds, "extra_bytes": _resident_bytes() - before}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
