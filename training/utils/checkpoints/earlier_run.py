"""An earlier run in the folder that a new one is to write to: refused, or removed by `--overwrite`. Cheap to import."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.checkpoints.folder import CheckpointFolder
    from training.utils.plugins.plugin import RunFile

_SUMMARY = "summary.json"
_FIGURES = (_SUMMARY, "reward_report.json")
_VERDICTS = "verdicts"  # of rewards that ask a service, which would be given again
_OF_A_FINISHED_RUN = (_SUMMARY, "model/config.json", "model/adapter_config.json")


def check_earlier_run(folder: CheckpointFolder, *, resumes: bool) -> None:
    """ThreestepError for an earlier run in the folder that a new one, or one that resumes, would write over."""
    if resumes:
        refuse_without_checkpoints(folder)
    else:
        refuse_earlier_run(folder)


def refuse_earlier_run(folder: CheckpointFolder) -> None:
    """ThreestepError if a new run would overwrite one that is finished, or the checkpoints of one."""
    steps, run = folder.steps(), folder.path.parent
    if steps:
        raise ThreestepError(
            f"{folder.path} holds checkpoints of an earlier run, up to step {steps[-1]}: give --resume to continue "
            "it, or another --output_dir, or --overwrite to replace that run"
        )
    left = [name for name in _OF_A_FINISHED_RUN if (run / name).exists()]
    if left:
        raise ThreestepError(
            f"--output_dir {run} holds a finished run ({', '.join(left)}): give another --output_dir, or --overwrite "
            "to replace that run"
        )


def refuse_without_checkpoints(folder: CheckpointFolder) -> None:
    """ThreestepError if a run that is to be resumed is finished and left no checkpoints: it would start again."""
    run = folder.path.parent
    if not folder.steps() and (run / _SUMMARY).exists():
        raise ThreestepError(
            f"--resume: {run} holds a finished run ({_SUMMARY}) and no checkpoint to resume from, which --save_at_end "
            "would have left: give another --output_dir, or --overwrite to replace that run"
        )


def remove_earlier_run(folder: CheckpointFolder) -> None:
    """Remove the checkpoints, verdicts and figures of an earlier run. A new run replaces its other files, the model at
    its end."""
    for place in (folder.path, folder.path.parent / _VERDICTS):
        shutil.rmtree(place, ignore_errors=True)
    remove_figures(folder)


def remove_figures(folder: CheckpointFolder) -> None:
    """Remove the figures of an earlier run's model, also of one that was killed: a new run may have none."""
    files: dict[str, RunFile] = added("run_files", _FIGURES)
    for name in (*_FIGURES, *(name for name, file in files.items() if file.is_result)):
        (folder.path.parent / name).unlink(missing_ok=True)
