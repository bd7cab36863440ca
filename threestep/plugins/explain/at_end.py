"""Explanations of steps at the end of a run, from their records: a process of `threestep audit explain` for each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import training
from threestep.plugins.audit.recording.schema import DESCRIPTION
from threestep.plugins.audit.started import outside_of_ranks
from training.utils.base.console import log

if TYPE_CHECKING:
    from training.utils.run.run_folder import EndedRun

EXPLAINED, PAGE = "explained", "explained.html"
_PROGRAM = "threestep.plugins.explain"


def explain_at_end(ended: EndedRun) -> None:
    """Explain the steps that a run asked for."""
    explain_steps(ended.folder.path, ended.settings["explain_steps"])


def explain_steps(run: Path, steps: Sequence[int]) -> None:
    """Write FOLDER/explained/step_000010/explained.html of each record of these steps. A failure is one line: the run
    itself succeeded."""
    for step in sorted(set(steps)):
        records = sorted((run / "records").glob(f"step_{step:06}*"), key=_update)
        for record in (each for each in records if (each / DESCRIPTION).is_file()):
            out = run / EXPLAINED / record.name
            problem = _explain(record, out)
            log(f"warning: step {step} is not explained: {problem}" if problem else f"explanation: {out / PAGE}")
        if not records:
            log(f"warning: step {step} is not explained: it has no record")


def _update(record: Path) -> int:
    number = record.name.rpartition("_update")[2]
    return int(number) if number.isdecimal() else 0


def _explain(record: Path, out: Path) -> str:
    """Return why there is no page; empty if there is one."""
    # The run's own code and data, in the hands of the user who has just run them.
    package = str(Path(training.__file__).parent)
    words = [sys.executable, package, _PROGRAM, str(record), "--trust_run", "--out", str(out)]
    try:
        found = subprocess.run(
            words, env=outside_of_ranks(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as problem:
        return str(problem)
    return (found.stderr.strip().splitlines() or ["it ended without a message"])[-1] if found.returncode else ""
