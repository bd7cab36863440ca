"""Which checkpoint a run resumes from, found and checked before anything is written to the run's folder; and whether it
may: which settings differ, and which of these may."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from training.utils.checkpoints.arguments import (
    KEPT_AS_BEGUN,
    LATEST,
    MAY_CHANGE,
    PER_STEP,
    PLACEMENT,
    CheckpointArguments,
)
from training.utils.checkpoints.expiry import expiry_of
from training.utils.checkpoints.folder import CheckpointFolder, damage, read_manifest
from training.utils.engine.collectives import on_main
from training.utils.engine.startup import Ranks
from training.utils.run.console import log
from training.utils.run.credentials import redacted_value
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

    def began_with(self, name: str) -> Any:
        """The setting of the run that is resumed; None if none is, or it has no such setting."""
        return None if self.resume_from is None else read_manifest(self.resume_from)["settings"].get(name)

    def decided(self, settings: Mapping[str, Any]) -> CheckpointPlan:
        """The plan with settings that the flags left open."""
        return replace(self, settings={**self.settings, **settings})

    @property
    def flags_in_use(self) -> dict[str, Any]:
        """The settings that are flags."""
        return {name: value for name, value in self.settings.items() if name not in ("program", "ranks")}


def plan_checkpoints(
    flags: CheckpointArguments, output_dir: str, program: str, settings: dict[str, Any], ranks: Ranks
) -> CheckpointPlan:
    """Find the checkpoint to resume from. program: the module, as `python -m` takes it. A collective.

    ThreestepError if a new run would overwrite checkpoints, if all of them are damaged, and if they were written with
    other settings, which are named; and where --stop_at can read no time.
    """
    folder = CheckpointFolder(output_dir)
    settings = {**settings, "program": program, "ranks": ranks.world_size}

    def find() -> Path | None:
        if flags.stop_at is not None:
            expiry_of(flags.stop_at).read()
        found = _find(flags, folder)
        if found is not None:
            check_settings(found, read_manifest(found)["settings"], settings)
            folder.point_to(found)
        return found

    return CheckpointPlan(flags, folder, settings, on_main(find, ranks.is_main, patient=True))


def _find(flags: CheckpointArguments, folder: CheckpointFolder) -> Path | None:
    steps = folder.steps()
    if flags.resume is None:
        refuse_checkpoints(folder)
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


def refuse_checkpoints(folder: CheckpointFolder) -> None:
    """ThreestepError if a new run would overwrite those of an earlier one."""
    steps = folder.steps()
    if steps:
        raise ThreestepError(
            f"{folder.path} holds checkpoints of an earlier run, up to step {steps[-1]}: give --resume to continue "
            "it, or another --output_dir, or remove that folder"
        )


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


def check_settings(found: Path, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """ThreestepError that names every setting of the checkpoint `found` that differs in the resumed run but may not.
    saved, mine: flags by name, and `ranks`."""
    saved = redacted_value(saved)  # an earlier version's have credentials
    both = saved.keys() & mine.keys()
    batches = {what: flags for what, flags in PER_STEP.items() if {*flags, "ranks"} <= both}
    free = MAY_CHANGE | PLACEMENT | {flag for flags in batches.values() for flag in flags}
    differ = [
        f"{_displayed(name)} was {saved[name]} and is {mine[name]}"
        for name in sorted(both - free)
        if mine[name] not in (saved[name], KEPT_AS_BEGUN.get(name, saved[name]))
    ]
    for what, flags in batches.items():
        was, now = (math.prod(settings[name] for name in (*flags, "ranks")) for settings in (saved, mine))
        if was != now:
            product = " x ".join(f"--{flag}" for flag in flags)
            differ.append(
                f"the {what} ({product} x ranks) were {was} on {_ranks(saved)} and are {now} on {_ranks(mine)}"
            )
    if differ:
        raise ThreestepError(
            f"--resume: {found} was written with other settings: {'; '.join(differ)}; restore them, or start again in "
            "another --output_dir"
        )


def placement(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The number of ranks and the ZeRO stages that a run keeps its models in."""
    return {name: settings[name] for name in sorted(PLACEMENT & settings.keys())}


def describe_placement(settings: Mapping[str, Any]) -> str:
    """The same in words."""
    flags = {name: value for name, value in placement(settings).items() if name != "ranks" and value is not False}
    stages = [f"--{name} {value}" for name, value in flags.items()]
    return ", ".join([_ranks(settings), *stages])


def _ranks(settings: Mapping[str, Any]) -> str:
    return f"{settings['ranks']} rank{'' if settings['ranks'] == 1 else 's'}"


def _displayed(name: str) -> str:
    plain = {"program": "the program", "data": "the data's fingerprint"}
    return plain.get(name, name if " " in name else f"--{name}")
