"""Writes a report: on request, and at the end of a run, where a failure is only a warning."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from threestep.plugins.report.figures.outcome import fallen_sentence, worse_sentence
from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.hub import publish_model
from threestep.plugins.report.pages.page import page
from training.utils.base.console import WARNINGS, log
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import replace_file

if TYPE_CHECKING:
    from training.utils.run.run_folder import EndedRun

REPORT_NAME = "report.html"


def write_report(folders: Sequence[str | Path], out: Path) -> Path:
    """Write the report of the runs in `folders` to the file `out`. ThreestepError if a folder holds no run, or `out`
    cannot be written."""
    runs = read_runs(folders)
    content = page(runs, datetime.datetime.now()).encode("utf-8", "replace")  # half a surrogate pair is not UTF-8
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, content)
    except OSError as problem:
        raise ThreestepError(f"cannot write the report to {out}: {problem.strerror}") from problem
    return out


def end_run(ended: EndedRun) -> str:
    """Write the run's warnings, its report and its model's card, and upload, without ever failing the run; return
    `worse_at_end`."""
    ended.folder.run_log("warnings.jsonl").append(map(json.dumps, WARNINGS))
    WARNINGS.clear()  # a program may run several steps
    report_at_end(ended.folder.path, ended.settings["report"])
    if ended.trains:
        publish_model(ended.folder.path, ended.settings)
    return worse_at_end(ended.folder.path)


def end_whole_run(folder: Path, switches: Mapping[str, bool]) -> None:
    """Write the report of all steps."""
    report_at_end(folder, switches["report"])


def worse_at_end(folder: Path) -> str:
    """End of a run's last line if training made its model worse; "" if it did not, or its files cannot be read."""
    try:
        [run] = read_runs([folder])
    except (ThreestepError, OSError):
        return ""
    sentences = [of(step) for step in run.steps if step.path == run.path for of in (worse_sentence, fallen_sentence)]
    return "".join(f"; warning: {sentence}" for sentence in sentences if sentence)


def report_at_end(folder: Path, is_wanted: bool) -> None:
    """Write `folder`'s report to it. Any failure is one line: the run itself succeeded."""
    if not is_wanted:
        return
    try:
        log(f"report: {write_report([folder], folder / REPORT_NAME)}")
    except Exception as problem:  # noqa: BLE001 (a report must never fail its run)
        log(
            f"warning: no report was written ({type(problem).__name__}: {problem}); to write it: threestep report "
            f"{folder}"
        )
