"""The records that an explanation reads: those of the run, or written by running its steps again.

A run's own files are read and never written. What it did not record is run again from the checkpoint before it, or
from the start, in a folder of its own, with the state's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from threestep.plugins.audit.bisect.digest_files import read_digests
from threestep.plugins.audit.bisect.rerun import Start, rerun
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recording.files import read_record
from threestep.plugins.audit.recording.schema import DESCRIPTION
from training.utils.base.console import counted
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from threestep.plugins.audit.recording.files import StepRecord


def is_record(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def run_of(folder: Path) -> Path:
    """The run's folder, of itself or of a record in it."""
    return folder.parent.parent if is_record(folder) else folder


def whole_record(folder: Path) -> AuditedStep:
    """Read a record with its state. ThreestepError for one without."""
    record = read_record(folder)
    if not _has_state(record):
        raise ThreestepError(
            f"{folder} does not have the weights before and after the step; record them with --record_values, or pass "
            "the run's folder and --step to rerun the step"
        )
    return AuditedStep(record)


def _has_state(record: StepRecord) -> bool:
    kinds = ("weights_before.", "weights_after.", "gradients.", "exp_avg.")
    return all(any(name.startswith(kind) for name in record.state) for kind in kinds)


def steps_of_run(run: Path, steps: Sequence[int], update: int, *, work: Path, start: Start | None) -> list[AuditedStep]:
    """Return the records of steps that follow each other, of step 3 all their updates up to `update` of the last. work:
    the folder in which they are run again where the run has no record of one with its state. start: None: nothing is
    run, and that is a ThreestepError."""
    found = recorded_steps(run / "records", steps, update)
    if found is not None:
        return found
    if start is None:
        raise ThreestepError(
            f"{run} has no record of step {steps[-1]:,} with its weights, and rerunning the step would run the run's "
            "own settings and code; add --trust_run if you trust the run, or record steps with --record_values"
        )
    digests = read_digests(run)
    sharing = digests.settings.get("sequence_parallel_size") or 1
    if sharing != 1:
        raise ThreestepError(
            f"{run} used --sequence_parallel_size {sharing}, but a step is recorded with whole rows on one rank, so "
            "this step cannot be rerun exactly; explain a run without this flag"
        )
    last = next((key for key in ((steps[-1], 0), (steps[-1], update)) if key in digests.steps), None)
    if last is None:
        _check_update(steps[-1], max((own for step, own in digests.steps if step == steps[-1]), default=update), update)
        known = sorted({step for step, _ in digests.steps})
        span = f"{known[0]:,} to {known[-1]:,}" if known else "none"
        raise ThreestepError(f"--step expects a step of {run} ({span}), got {steps[-1]:,}, update {update}")
    own = {"record_steps": list(steps), "record_values": True}
    again = rerun(digests, last, work, start, first=steps[0], settings=own)
    found = recorded_steps(again.folder.parent, steps, update)
    if found is None:
        raise ThreestepError(
            f"{run} was rerun in {work} up to step {steps[-1]:,}, but its records lack the state: the model has too "
            "many weights, the step was skipped, or its rows are not plain sequences; see the log next to that folder"
        )
    return found


def recorded_steps(folder: Path, steps: Sequence[int], update: int) -> list[AuditedStep] | None:
    """Records of the steps in a folder, if all are there with their state."""
    found = []
    for step in steps:
        own = folder / f"step_{step:06}"
        parts = sorted(folder.glob(f"step_{step:06}_update*"), key=_update)
        if step == steps[-1] and (parts or is_record(own)):
            _check_update(step, max(map(_update, parts), default=1), update)
            parts = [part for part in parts if _update(part) <= update]
        for part in parts or [own]:
            if not is_record(part):
                return None
            record = read_record(part)
            if not _has_state(record):
                return None
            found.append(AuditedStep(record))
    return found


def _check_update(step: int, updates: int, update: int) -> None:
    if update > updates:
        has = counted(updates, "update")
        raise ThreestepError(f"--update expects 1 to {updates}, since step {step:,} has {has}, got {update}")


def _update(folder: Path) -> int:
    return int(folder.name.rpartition("_update")[2])
