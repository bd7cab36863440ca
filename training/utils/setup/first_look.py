"""Checks of a run before libraries load and ranks start: an earlier run in its folder, data that do not fit.

Cheap to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.other_runs import check_earlier_run
from training.utils.data.file_dataset import look_at_data

if TYPE_CHECKING:
    from training.utils.checkpoints.arguments import CheckpointArguments
    from training.utils.data.arguments import SourceArguments
    from training.utils.flags.step import Step
    from training.utils.run.run_arguments import RunArguments


def look_first(
    step: Step,
    run: RunArguments,
    checkpoints: CheckpointArguments,
    source: SourceArguments,
    *,
    runs: bool = True,
) -> None:
    """ThreestepError if the folder holds a finished run, or if the data cannot serve the step. runs: False where
    something else is done in place of a run, which needs neither"""
    if not runs:
        return
    if not checkpoints.overwrite:
        check_earlier_run(CheckpointFolder(run.output_dir), resumes=checkpoints.resume is not None)
    if step.number:  # of the phase whose rows it takes
        look_at_data(int(step.number), source)
