"""Which checkpoint a run resumes from: found and checked before anything is written to the run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.utils.checkpoints.arguments import LATEST, CheckpointArguments
from training.utils.checkpoints.folder import CheckpointFolder, damage, read_manifest
from training.utils.checkpoints.settings_check import check_settings
from training.utils.engine.collectives import on_main
from training.utils.engine.startup import Ranks
from training.utils.run.console import log
from training.utils.run.errors import ThreestepError


@dataclass(frozen=True)
class CheckpointPlan:
    """What the flags ask for.

    settings: every flag of the run, its `program` and its number of `ranks`
    resume_from: an undamaged checkpoint in `folder`; None if the run starts from the beginning
    """

    flags: CheckpointArguments
    folder: CheckpointFolder
    settings: dict[str, Any]
    resume_from: Path | None


def plan_checkpoints(
    flags: CheckpointArguments, output_dir: str, program: str, settings: dict[str, Any], ranks: Ranks
) -> CheckpointPlan:
    """Find the checkpoint to resume from. program: the module, as `python -m` takes it. A collective.

    ThreestepError if a new run would overwrite checkpoints, if all of them are damaged, and if they were written with
    other settings, which are named.
    """
    folder = CheckpointFolder(output_dir)
    settings = {**settings, "program": program, "ranks": ranks.world_size}

    def find() -> Path | None:
        found = _find(flags, folder)
        if found is not None:
            check_settings(found, read_manifest(found)["settings"], settings)
            folder.point_to(found)
        return found

    return CheckpointPlan(flags, folder, settings, on_main(find, ranks.is_main, patient=True))


def _find(flags: CheckpointArguments, folder: CheckpointFolder) -> Path | None:
    steps = folder.steps()
    if flags.resume is None:
        if steps:
            raise ThreestepError(
                f"{folder.path} holds checkpoints of an earlier run, up to step {steps[-1]}: give --resume to continue "
                "it, or another --output_dir, or remove that folder"
            )
        return None
    if flags.resume != LATEST:
        return _named(Path(flags.resume), folder)
    if not steps:
        log(f"--resume: no checkpoint in {folder.path} yet, the run starts from the beginning")
        return None
    found, problems = folder.latest_undamaged()
    for problem in problems:
        log(f"warning: --resume skips {problem}")
    if found is None:
        raise ThreestepError(
            f"--resume: every checkpoint in {folder.path} is damaged ({'; '.join(problems)}); to start again, remove "
            "that folder"
        )
    return found


def _named(path: Path, folder: CheckpointFolder) -> Path:
    if path.resolve().parent != folder.path.resolve() or not path.resolve().name.startswith("step_"):
        raise ThreestepError(
            f"--resume expects a checkpoint in {folder.path} (DeepSpeed's files are loaded only from the run's own "
            f"folder), got {path}; to resume elsewhere, copy the whole run and give its --output_dir"
        )
    problem = damage(path) if path.is_dir() else "there is no such folder"
    if problem is not None:
        raise ThreestepError(f"--resume {path}: {problem}; --resume without a path takes the latest undamaged one")
    return folder.path / path.resolve().name
