"""Checkpoints of a training loop on all ranks: when one is due, writing it, and loading it on resuming.

All files are JSON or safetensors, also those that DeepSpeed writes and loads for its engines (see
`engine.checkpoint_files`). They are loaded only after every byte was compared with the manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.console import WHOLE_RUN_VARIABLE, log, resuming_command
from training.utils.base.errors import disk_errors
from training.utils.base.seeds import derived_seed
from training.utils.base.storage import flush_to_disk
from training.utils.checkpoints.folder import (
    CheckpointFolder,
    as_written,
    check_keys,
    damage,
    read_manifest,
    read_record,
    stranger,
)
from training.utils.checkpoints.interrupts import SIGNALS, Interrupts
from training.utils.checkpoints.parts import CheckpointParts, disk_error_of
from training.utils.checkpoints.plan import CheckpointPlan, check_settings, conversion, describe_placement, placement
from training.utils.contracts.run import Checkpoints
from training.utils.engine.ranks.collectives import from_main, largest, on_main
from training.utils.layout.order import completes_epochs
from training.utils.run.metrics import MetricsWriter
from training.utils.run.trackers import open_trackers, trackers_in

if TYPE_CHECKING:
    from training.utils.contracts.run import RunCourse
    from training.utils.run.run_folder import RunFolder

_TRAINER_FILE = "trainer.json"
_WRITTEN = ("step", "seconds", "log_sizes", "state")
_OF_COURSE = ("best", "early_end", "called")
_BY_COURSE = len(SIGNALS) + 1  # `RunCourse.stop_reason`


@dataclass(frozen=True)
class ResumePoint:
    """Start of a resumed run; by default, its beginning. step, seconds, log_sizes: of the run that wrote the
    checkpoint; state: the one that its loop gave to `save`; course: the states of `RunCourse`."""

    step: int = 0
    seconds: float = 0.0
    log_sizes: dict[str, int] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    course: Mapping[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def checkpointed_run(
    plan: CheckpointPlan,
    run: RunFolder,
    parts: CheckpointParts,
    data_fingerprint: str,
    *,
    model_digests: Mapping[str, Callable[[], str]] | None = None,
    steps_per_epoch: float = 0.0,
    course: Sequence[RunCourse] = (),
) -> Iterator[tuple[MetricsWriter, Checkpoints]]:
    """Give the metrics and checkpoints of a loop that trains `parts`. Inside, signals wait for the end of a step.

    model_digests: digests of the models that a resumed run loads again, by flag; called on rank 0. ThreestepError if
    the checkpoint belongs to other data or other such models.
    steps_per_epoch: for --save_epochs. course: those of plugins.
    """
    digests = {f"the content of --{flag}": digest for flag, digest in (model_digests or {}).items()}
    is_main = parts.ranks.is_main
    contents = on_main(lambda: {name: digest()[:12] for name, digest in digests.items()}, is_main, patient=True)
    plan = plan.decided({"data": data_fingerprint, **contents})
    point = ResumePoint()
    if plan.resume_from is not None:
        manifest = read_manifest(plan.resume_from)
        check_settings(plan.resume_from, manifest, plan.settings, plan.defaults, may_change=plan.may_differ)
        point = _resume_point(plan.resume_from)
    run.cut_logs(point.log_sizes)  # at the beginning of a run, removes those of an earlier one
    trackers = open_trackers(trackers_in(plan.settings), run.path, plan.settings, point.step) if is_main else []
    lines = run.run_log("metrics.jsonl")
    writer = MetricsWriter(run.path, is_main, point.step, point.seconds, trackers=trackers, lines=lines, course=course)
    with writer as metrics, Interrupts(is_main, alone=parts.ranks.world_size == 1) as interrupts:
        yield (metrics, RunCheckpoints(plan, run, parts, metrics, interrupts, point, steps_per_epoch, course))


def _resume_point(path: Path) -> ResumePoint:
    """Read the point at which a checkpoint resumes. ThreestepError if this version writes another form."""
    where = path / _TRAINER_FILE
    saved = read_record(where)
    # Earlier versions wrote `best`, `early_end` and `called`, which are in `course` now.
    check_keys(saved, _WRITTEN, str(where), optional=("course", *_OF_COURSE))
    with as_written(str(where)):
        return ResumePoint(
            int(saved["step"]),
            float(saved["seconds"]),
            {name: int(size) for name, size in saved["log_sizes"].items()},
            dict(saved["state"]),
            {name: saved[name] for name in _OF_COURSE if saved.get(name)} | (saved.get("course") or {}),
        )


@dataclass
class RunCheckpoints(Checkpoints):
    """The checkpoints of a run in its folder. plan: with all the settings that their manifests record."""

    plan: CheckpointPlan
    run: RunFolder
    parts: CheckpointParts
    metrics: MetricsWriter
    interrupts: Interrupts
    point: ResumePoint
    steps_per_epoch: float = 0.0
    course: Sequence[RunCourse] = ()

    def __post_init__(self) -> None:
        self._ranks = self.parts.ranks
        self._stop = 0
        self._why: str | None = None  # of a stop that a part of the course asks for, on the main rank
        self._retry_at: int | None = None  # the step after which a save that failed is tried again
        self._failures = 0  # in a row
        self._judges = [part for part in self.course if part.judges]
        self._due: int | None = None  # a step after which one is due by its evaluation
        self._ends = False

    def restore(self) -> tuple[int, dict[str, Any]]:
        point, path = self.point, self.plan.resume_from
        if path is None:
            return 0, {}
        self._load(path, point.step)
        for part in self.course:
            on_main(partial(part.resumed, point.course), self._ranks.is_main)
        log(f"resuming after step {point.step}, from {path}", self._ranks.is_main)
        return point.step, point.state

    def _load(self, path: Path, step: int) -> None:
        """Load the checkpoint of `step`."""
        saved = read_manifest(path)["settings"]
        if placement(saved) == placement(self.plan.settings):
            return self.parts.load(path)
        load_converted = conversion(path, saved, self.plan.settings)
        before, now = (describe_placement(settings) for settings in (saved, self.plan.settings))
        log(f"{path} was written on {before}; converting it for {now}", self._ranks.is_main)
        # With another number of ranks the generators start anew: not as at the run's beginning, but always the same.
        seed = derived_seed(self.plan.settings.get("seed", 0), "resumed", step, self._ranks.world_size)
        load_converted(self.parts, path, self.plan.folder.universal(step), saved_ranks=saved["ranks"], seed=seed)

    def evaluated(self, step: int) -> None:
        if not self._judges:
            return
        figures = self.metrics.evaluation
        if any(on_main(lambda: [part.evaluated(step, figures) for part in self._judges], self._ranks.is_main)):
            self._due = step

    def load_final(self, step: int) -> dict[str, Any] | None:
        finals = (final for part in self._judges if (final := part.final(step)) is not None)
        final = on_main(lambda: next(finals, None), self._ranks.is_main) if self._judges else None
        if final is None:
            return None
        path = self.plan.folder.of(final.step)
        problem = on_main(lambda: damage(path) or stranger(path), self._ranks.is_main, patient=True)
        if problem is not None:
            log(f"warning: the model is from step {step:,}, not {final.why}: {path}: {problem}", self._ranks.is_main)
            return None
        self._load(path, final.step)
        log(f"the model is {final.why}; loading its weights from {path}", self._ranks.is_main)
        return dict(_resume_point(path).state)

    def ends(self, step: int) -> bool:
        if self._ends or not self._judges:
            return self._ends
        reasons = (reason for part in self._judges if (reason := part.end_reason()) is not None)
        reason = on_main(lambda: next(reasons, None), self._ranks.is_main)
        if reason is not None:
            self._ends = True
            log(f"training ends after step {step:,}: {reason}", self._ranks.is_main)
        return self._ends

    def due(self, step: int, total_steps: int) -> bool:
        flags = self.plan.flags
        self._stop = largest(self._stop_reason(), self._ranks.device)
        if step >= total_steps:
            self._stop = 0  # the run ends now anyway, with its model
            return flags.save_at_end
        if step == self._due:
            return True
        by_steps = flags.save_every > 0 and step % flags.save_every == 0
        retries = step == self._retry_at
        return self._stop > 0 or by_steps or retries or completes_epochs(step, flags.save_epochs, self.steps_per_epoch)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        started = time.monotonic()
        error = self._write(step, state, self.plan.folder)
        if error is not None and self._stop:
            error = self._write(step, state, self.plan.folder)  # an error of the moment?
        self._plan_retry(step, failed=error is not None)
        if error is not None:
            log(self._save_failed_message(step, error), self._ranks.is_main)
        if error is None:
            for part in self.course if self._ranks.is_main else ():
                part.saved(step)
            where = self.plan.folder.of(step)
            log(f"checkpoint after step {step:,} in {time.monotonic() - started:.1f} s: {where}", self._ranks.is_main)
        if self._stop:
            rescued = self._rescued(step, state) if error is not None else None
            log(self._stop_message(step, error is None, rescued), self._ranks.is_main)
            raise SystemExit(0 if error is None else 1)

    def _plan_retry(self, step: int, failed: bool) -> None:
        """A save that failed is tried again after 1, 2, 4, ... further steps, besides those of --save_every. Steps, not
        seconds: every rank must come to the same answer."""
        self._failures = self._failures + 1 if failed else 0
        self._retry_at = step + 2 ** min(self._failures - 1, 20) if failed else None

    def _rescued(self, step: int, state: Mapping[str, Any]) -> Path | None:
        """Write the checkpoint of an ending run to another folder; None if there is none or it fails. A collective."""
        places: list[str] = []

        def find() -> None:
            found = (part.other_folder(self.run.path) for part in self.course)
            places.extend(str(place) for place in found if place is not None)

        is_main = self._ranks.is_main
        error = disk_error_of(find, is_main)
        if error is None:
            if not (found := from_main(places)):
                return None
            folder = CheckpointFolder(found[0])
            error = self._write(step, state, folder)
        if error is not None:
            log(f"warning: the checkpoint could not be written to another folder either ({error})", is_main)
            return None
        return folder.of(step)

    def _write(self, step: int, state: Mapping[str, Any], folder: CheckpointFolder) -> str | None:
        """Write and publish a checkpoint in `folder`; on a disk error, restore the one before and return the error."""
        is_main = self._ranks.is_main
        error = (
            disk_error_of(lambda: folder.begin(step, self.parts.engines), is_main)
            or self.parts.write(folder.partial(step))
            or disk_error_of(lambda: self._publish(step, state, folder), is_main)
        )
        if error is not None and is_main:
            with contextlib.suppress(OSError):  # it stays as `step_x.partial`, which the next save removes
                folder.give_up(step)
        return error

    def _publish(self, step: int, state: Mapping[str, Any], folder: CheckpointFolder) -> None:
        self.metrics.flush()
        sizes = self.run.log_sizes()
        for name in sizes:
            with contextlib.suppress(OSError):  # a checkpoint is worth more than its logs
                flush_to_disk(self.run.path / name)
        saved = {"step": step, "seconds": self.metrics.seconds, "log_sizes": sizes, "state": dict(state)}
        states = (part.state(step) for part in self.course)
        saved |= {"course": {name: each for state in states for name, each in state.items()}}
        with disk_errors(folder.partial(step)):
            self.parts.describe(folder.partial(step))
        (folder.partial(step) / _TRAINER_FILE).write_text(json.dumps(saved), encoding="utf-8")
        about = {"settings": self.plan.settings, "defaults": dict(self.plan.defaults), "chosen": self.plan.chosen}
        folder.publish(step, about)
        with contextlib.suppress(OSError):  # what cannot be removed now is removed after the next save
            folder.prune(step, self.plan.flags.keep_last, {part.kept(step) for part in self.course})

    def _stop_reason(self) -> int:
        """The reason why this rank must stop: a signal's place in SIGNALS, from 1 on, or _BY_COURSE; 0 without one."""
        for place, number in enumerate(SIGNALS, start=1):
            if self.interrupts.reason == number.name:
                return place
        if self._ranks.is_main:
            self._why = next((why for part in self.course if (why := part.stop_reason()) is not None), None)
        return 0 if self._why is None else _BY_COURSE

    def _save_failed_message(self, step: int, error: str) -> str:
        last = next(iter(self.plan.folder.latest_first()), None)
        again = "" if self._stop else f", with the next attempt after step {self._retry_at:,} at the latest"
        return (
            f"warning: NO CHECKPOINT was written after step {step} ({error}); training continues{again}. "
            f"{'There is no earlier checkpoint' if last is None else f'The last good one is {last}'}; free disk space, "
            "or lower --keep_last"
        )

    def _stop_message(self, step: int, was_saved: bool, rescued: Path | None = None) -> str:
        reason = self._why or "" if self._stop == _BY_COURSE else SIGNALS[self._stop - 1].name
        if rescued is not None:
            reason += f"; the checkpoint is in {rescued}, so first move it to {self.plan.folder.of(step)}"
        elif not was_saved:
            reason += "; no checkpoint was written for this step"
        if WHOLE_RUN_VARIABLE in os.environ:  # which is resumed as a whole
            return f"stopped after step {step} ({reason})"
        config = shlex.quote(str(self.run.path / "config.yaml"))
        command = resuming_command(self.plan.settings["program"], self._ranks.world_size)
        return f"stopped after step {step} ({reason}); to resume: {command} --config {config} --resume"
