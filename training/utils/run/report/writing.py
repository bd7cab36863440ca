"""Writes a report: on request, and at the end of a run, where a failure warns and changes nothing else."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

from training.utils.run.errors import ThreestepError
from training.utils.run.metrics import say
from training.utils.run.report.page import page
from training.utils.run.report.reading import read_runs

REPORT_NAME = "report.html"


def write_report(folders: Sequence[str | Path], out: Path) -> Path:
    """Write the report of the runs in `folders` to the file `out`, as a whole or not at all. ThreestepError where a
    folder holds no run, or `out` cannot be written."""
    runs = read_runs(folders)
    # Half a surrogate pair in a response is no UTF-8.
    content = page(runs, datetime.datetime.now()).encode("utf-8", "replace")
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        os.replace(beside, out)
    except OSError as problem:
        raise ThreestepError(f"cannot write the report to {out}: {problem.strerror}") from problem
    return out


def report_at_end(folder: Path, is_wanted: bool) -> None:
    """Write `folder`'s report beside its files and say where. Whatever goes wrong is one line: the run was a good one
    without it. On the main rank alone."""
    if not is_wanted:
        return
    try:
        say(f"report: {write_report([folder], folder / REPORT_NAME)}")
    except Exception as problem:  # noqa: BLE001 (a picture of the run must never fail the run)
        say(f"warning: no report was written ({type(problem).__name__}: {problem}); python -m training.report {folder}")
