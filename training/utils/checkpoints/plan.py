"""The checkpoint that a run resumes from, found and checked before anything is written to the run's folder; and the
settings that differ from its run's, refused unless they may."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.checkpoints.arguments import (
    CHOSEN_AGAIN,
    DEALT_TO_GROUPS,
    KEPT_AS_BEGUN,
    LATEST,
    PER_STEP,
    PLACEMENT,
    SHARING_ROWS,
    CheckpointArguments,
)
from training.utils.checkpoints.folder import (
    MANIFEST,
    MANIFEST_KEYS,
    CheckpointFolder,
    check_keys,
    damage,
    read_manifest,
    stranger,
)
from training.utils.checkpoints.other_runs import check_earlier_run
from training.utils.engine.ranks.collectives import on_main
from training.utils.plugins.registry import added, missing_plugin

if TYPE_CHECKING:
    from training.utils.engine.ranks.startup import Ranks


UNIVERSAL = "universal"  # the one conversion


@dataclass(frozen=True)
class CheckpointPlan:
    """The checkpoints that the flags ask for.

    settings: every flag of the run, its `program` and its number of `ranks`
    resume_from: an undamaged checkpoint in `folder`; None if the run starts from the beginning
    defaults: of the flags among `settings`
    may_change: those of them that a resumed run may change
    given: the settings before any was decided
    """

    flags: CheckpointArguments
    folder: CheckpointFolder
    settings: dict[str, Any]
    resume_from: Path | None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    may_change: Collection[str] = ()
    given: Mapping[str, Any] = field(default_factory=dict)

    def began_with(self, name: str) -> Any:
        """The setting of the run that is resumed; None if none is, or it has no such setting."""
        return None if self.resume_from is None else read_manifest(self.resume_from)["settings"].get(name)

    def decided(self, settings: Mapping[str, Any]) -> CheckpointPlan:
        """The plan with settings that the flags left open."""
        return replace(self, settings={**self.settings, **settings})

    @property
    def chosen(self) -> list[str]:
        """The settings that the flags left to the program, which are no settings of the user's."""
        open_ones = (name for name, auto in KEPT_AS_BEGUN.items() if name in self.given and self.given[name] == auto)
        return [name for name in open_ones if self.settings[name] != self.given[name]]

    @property
    def may_differ(self) -> set[str]:
        """Settings that may differ from those of the checkpoint: those that may change, and choices made again."""
        return {*self.may_change, *CHOSEN_AGAIN.intersection(self.chosen)}

    @property
    def flags_in_use(self) -> dict[str, Any]:
        """The settings that are flags."""
        return {name: value for name, value in self.settings.items() if name not in ("program", "ranks")}


def plan_checkpoints(
    flags: CheckpointArguments,
    output_dir: str,
    program: str,
    settings: dict[str, Any],
    *,
    ranks: Ranks,
    defaults: Mapping[str, Any] | None = None,
    may_change: Collection[str] = (),
) -> CheckpointPlan:
    """Find the checkpoint to resume from. A collective.

    program: the module, as `python -m` takes it. settings, defaults: of every flag. may_change: flags that a
        resumed run may change

    ThreestepError if a new run would overwrite checkpoints, if all of them are damaged, and if they were written with
    other settings, which are named.
    """
    folder = CheckpointFolder(output_dir)
    settings = {**settings, "program": program, "ranks": ranks.world_size}

    def find() -> Path | None:
        found = _find(flags, folder)
        if found is not None:
            if (problem := stranger(found)) is not None:
                raise ThreestepError(f"--resume: {found}: {problem}")
            manifest = read_manifest(found)
            _check_manifest(found / MANIFEST, manifest)
            check_settings(found, manifest, settings, defaults or {}, may_change=may_change)
            if placement(manifest["settings"]) != placement(settings):
                conversion(found, manifest["settings"], settings)
            folder.point_to(found)
        return found

    found = on_main(find, ranks.is_main, patient=True)
    return CheckpointPlan(flags, folder, settings, found, defaults or {}, may_change, given=settings)


def _find(flags: CheckpointArguments, folder: CheckpointFolder) -> Path | None:
    if flags.resume not in (None, LATEST):
        return _named(Path(flags.resume), folder)
    if not flags.overwrite:
        check_earlier_run(folder, resumes=flags.resume is not None)
    if flags.resume is None:
        return None
    if not folder.steps():
        log(f"--resume: no checkpoint in {folder.path} yet; starting from the beginning")
        return None
    found, problems = folder.latest_undamaged()
    for problem in problems:
        log(f"warning: --resume skips {problem}")
    if found is None:
        raise ThreestepError(
            f"--resume: every checkpoint in {folder.path} is damaged ({'; '.join(problems)}); to start over, "
            "remove that folder"
        )
    return found


def _named(path: Path, folder: CheckpointFolder) -> Path:
    if path.resolve().parent != folder.path.resolve() or not path.resolve().name.startswith("step_"):
        raise ThreestepError(
            f"--resume expects a checkpoint in {folder.path} (DeepSpeed's files are loaded only from the run's own "
            f"folder), got {path}; to resume elsewhere, copy the whole run and use its --output_dir"
        )
    problem = damage(path) if path.is_dir() else "there is no such folder"
    if problem is not None:
        raise ThreestepError(f"--resume {path}: {problem}; --resume alone uses the latest undamaged checkpoint")
    return folder.path / path.resolve().name


def _check_manifest(where: Path, manifest: Mapping[str, Any]) -> None:
    """ThreestepError if the manifest lacks what a resume compares."""
    check_keys(manifest, set(MANIFEST_KEYS) - {"chosen"}, str(where), optional=("chosen",))
    for name, kind, word in (("settings", dict, "a table"), ("defaults", dict, "a table"), ("chosen", list, "a list")):
        if not isinstance(manifest.get(name, kind()), kind):
            raise ThreestepError(f"--resume: {where}: '{name}' is not {word}; resume from an earlier checkpoint")
    if missing := {"program", "ranks"} - manifest["settings"].keys():
        raise ThreestepError(
            f"--resume: the settings in {where} lack {', '.join(sorted(missing))}; resume from an earlier checkpoint"
        )


def check_settings(
    found: Path,
    manifest: Mapping[str, Any],
    mine: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    may_change: Collection[str] = (),
) -> None:
    """ThreestepError that names every setting of the checkpoint `found` that differs in the resumed run but may not.

    A setting that one version alone has is compared with its default, where that is known. What the program chose for
    the run may differ, but for what decides its rows.
    manifest: of the checkpoint, by any version. mine: flags by name, and `ranks`. defaults: of the flags in `mine`, of
    which those in may_change may differ
    """
    saved, saved_defaults = manifest["settings"], manifest["defaults"]
    both = saved.keys() & mine.keys()
    batches = {what: flags for what, flags in PER_STEP.items() if {*flags, "ranks"} <= both}
    free = PLACEMENT.union(may_change, CHOSEN_AGAIN.intersection(manifest.get("chosen", ())), *batches.values())
    differ = [
        f"{_displayed(name)} was {saved[name]} and is now {mine[name]}"
        for name in sorted(both - free)
        if mine[name] not in (saved[name], KEPT_AS_BEGUN.get(name, saved[name]))
    ]
    only_mine = mine.keys() & defaults.keys() - saved.keys() - free - KEPT_AS_BEGUN.keys()
    differ += [
        f"{_displayed(name)} did not exist yet (equivalent to {defaults[name]}) and is now {mine[name]}"
        for name in sorted(only_mine)
        if mine[name] != defaults[name]
    ]
    differ += [
        f"{_displayed(name)} was {saved[name]}, but this version has no such setting"
        for name in sorted(saved.keys() & saved_defaults.keys() - mine.keys() - free)
        if saved[name] != saved_defaults[name]
    ]
    for what, flags in batches.items():
        was, now = (
            math.prod(settings[name] for name in (*flags, "ranks"))
            // (math.prod(settings.get(name, 1) for name in SHARING_ROWS) if what in DEALT_TO_GROUPS else 1)
            for settings in (saved, mine)
        )
        if was != now:
            product = " x ".join(f"--{flag}" for flag in flags)
            differ.append(
                f"the {what} ({product} x ranks) were {was} on {_ranks(saved)} and are now {now} on {_ranks(mine)}"
            )
    if differ:
        raise ThreestepError(
            f"--resume: {found} was written with other settings: {'; '.join(differ)}; restore them, or start over in "
            "another --output_dir"
        )


def placement(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The number of ranks and the ZeRO stages that a run keeps its models in."""
    return {name: settings[name] for name in sorted(PLACEMENT & settings.keys())}


def conversion(found: Path, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> Callable[..., None]:
    """Return what loads the checkpoint `found`, of a run with the settings `saved`, on other ranks or ZeRO stages
    (`conversions` of `Plugin.tables`). ThreestepError without such a plugin."""
    place = added("conversions", ()).get(UNIVERSAL)
    if place is None:
        raise ThreestepError(
            f"--resume: {found} was written on {describe_placement(saved)}, but this run is on "
            f"{describe_placement(mine)}. Such checkpoints must be converted first: "
            f"{missing_plugin('conversions', UNIVERSAL)}; resume with the original settings"
        )
    return named_object(place)


def describe_placement(settings: Mapping[str, Any]) -> str:
    """Return `placement` in words."""
    flags = {name: value for name, value in placement(settings).items() if name != "ranks" and value is not False}
    stages = [f"--{name} {value}" for name, value in flags.items()]
    return ", ".join([_ranks(settings), *stages])


def _ranks(settings: Mapping[str, Any]) -> str:
    return f"{settings['ranks']} rank{'' if settings['ranks'] == 1 else 's'}"


def _displayed(name: str) -> str:
    plain = {"program": "the program", "data": "the data's fingerprint"}
    return plain.get(name, name if " " in name else f"--{name}")
