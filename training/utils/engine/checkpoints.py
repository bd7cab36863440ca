"""Checkpoints of a run on all ranks: which one it goes on from, when one is due, what is written and loaded.

A loop asks three things (`Checkpoints`). DeepSpeed writes and loads its engines' files, which are pickles: they are
loaded from the run's own folder alone, and after every byte was compared with the manifest. All else is JSON.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.utils.engine.checkpoint_parts import Parts, agreed, noting
from training.utils.engine.collectives import largest, on_main
from training.utils.engine.export import describe_engine
from training.utils.engine.startup import Ranks
from training.utils.engine.training_engine import TrainingEngine
from training.utils.engine.weight_average import WeightAverage
from training.utils.run.checkpoint_arguments import LATEST, CheckpointArguments
from training.utils.run.checkpoints import CheckpointFolder, damage, read_manifest
from training.utils.run.errors import ThreestepError
from training.utils.run.interrupts import SIGNALS, Interrupts, seconds_since_start
from training.utils.run.metrics import MetricsWriter, say
from training.utils.run.report_arguments import trackers_in
from training.utils.run.run_folder import RunFolder
from training.utils.run.run_lock import only_run
from training.utils.run.seeds import derived_seed
from training.utils.run.settings_check import check_settings, placed, placement
from training.utils.run.storage import flush_to_disk

_TRAINER_FILE = "trainer.json"
_TIME_IS_SHORT = len(SIGNALS) + 1


class Checkpoints:
    """What a loop asks. This one keeps nothing: a loop by itself, as in tests."""

    def restore(self) -> tuple[int, dict[str, Any]]:
        """Load what the run goes on from. Return how many steps are done, and what the loop gave to `save` then; 0 and
        nothing where the run begins. A collective."""
        return 0, {}

    def due(self, step: int, total_steps: int) -> bool:
        """Whether the loop is to call `save` after `step`: the same answer on every rank. A collective."""
        return False

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint after `step`; where the run was asked to end, end the program with code 0. `state` is the
        loop's own, the same on every rank, as JSON holds it. A collective."""


@dataclass(frozen=True)
class CheckpointPlan:
    """What the flags ask for. found: the checkpoint to go on from, undamaged; None where the run begins."""

    flags: CheckpointArguments
    folder: CheckpointFolder
    program: str
    settings: dict[str, Any]
    found: Path | None


def plan_checkpoints(
    flags: CheckpointArguments, output_dir: str, program: str, settings: dict[str, Any], ranks: Ranks
) -> CheckpointPlan:
    """Find the checkpoint to go on from, before anything is written to the run's folder. program: the module, as
    `python -m` calls it. A collective.

    ThreestepError where the run would begin over an earlier one's checkpoints, where none of them is whole, and where
    they are of other settings, which are named.
    """
    folder = CheckpointFolder(output_dir)
    told = {**settings, "program": program, "ranks": ranks.world_size}
    found = on_main(lambda: _found(flags, folder, told), ranks.is_main, patient=True)
    return CheckpointPlan(flags, folder, program, told, found)


def _found(flags: CheckpointArguments, folder: CheckpointFolder, settings: dict[str, Any]) -> Path | None:
    found = _chosen(flags, folder)
    if found is not None:
        check_settings(found, read_manifest(found)["settings"], settings)
        folder.point_to(found)
    return found


def _chosen(flags: CheckpointArguments, folder: CheckpointFolder) -> Path | None:
    steps = folder.steps()
    if flags.resume is None:
        if steps:
            raise ThreestepError(
                f"{folder.path} holds checkpoints of an earlier run, up to step {steps[-1]}: give --resume to go on "
                "from them, or another --output_dir, or remove that folder"
            )
        return None
    if flags.resume != LATEST:
        return _named(Path(flags.resume), folder)
    if not steps:
        say(f"--resume: no checkpoint in {folder.path} yet, the run begins")
        return None
    problems = []
    for path in folder.latest_first():
        problem = damage(path)
        if problem is None:
            return path
        problems.append(f"{path.name}: {problem}")
        say(f"warning: --resume passes over {path}: {problem}")
    raise ThreestepError(
        f"--resume: no checkpoint in {folder.path} is whole ({'; '.join(problems)}); to begin anew, remove that folder"
    )


def _named(path: Path, folder: CheckpointFolder) -> Path:
    if path.resolve().parent != folder.path.resolve() or not path.resolve().name.startswith("step_"):
        raise ThreestepError(
            f"--resume expects a checkpoint in {folder.path} (DeepSpeed's files are loaded from the run's own folder "
            f"alone), got {path}; to go on elsewhere, copy the whole run and give its --output_dir"
        )
    problem = damage(path) if path.is_dir() else "there is no such folder"
    if problem is not None:
        raise ThreestepError(f"--resume {path}: {problem}; --resume without a path takes the latest that is whole")
    return folder.path / path.resolve().name


@contextlib.contextmanager
def only_run_in(output_dir: str, ranks: Ranks) -> Iterator[None]:
    """Hold the run's folder; ThreestepError on every rank, which names the other run, where one holds it. A
    collective."""
    with contextlib.ExitStack() as held:
        on_main(lambda: held.enter_context(only_run(output_dir)), ranks.is_main)
        yield


@contextlib.contextmanager
def kept_run(
    plan: CheckpointPlan,
    run: RunFolder,
    engines: Mapping[str, TrainingEngine | None],
    data_fingerprint: str,
    ranks: Ranks,
    average: WeightAverage | None = None,
    tokenizers: Mapping[str, Any] | None = None,
    start: Mapping[str, Callable[[], str]] | None = None,
) -> Iterator[tuple[MetricsWriter, Checkpoints]]:
    """Metrics that go on where the checkpoint ends, and the checkpoints of a loop that trains `engines` (and keeps
    `average`). Inside, signals wait for the end of a step.

    tokenizers: by the engines' names, for `training.export`. start: digests each model that a resumed run loads anew,
    by flag; called on rank 0. ThreestepError where the checkpoint is of other data or other such models.
    """
    digests = {f"the content of --{flag}": digest for flag, digest in (start or {}).items()}
    contents = on_main(lambda: {name: digest()[:12] for name, digest in digests.items()}, ranks.is_main, patient=True)
    settings = {**plan.settings, "data": data_fingerprint, **contents}
    told: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    if plan.found is not None:
        saved = read_manifest(plan.found)["settings"]
        check_settings(plan.found, saved, settings)
        told = json.loads((plan.found / _TRAINER_FILE).read_text(encoding="utf-8"))
    run.cut_logs(told.get("log_sizes", {}))  # an earlier run's, where this one begins
    present = {name: engine for name, engine in engines.items() if engine is not None}
    with (
        MetricsWriter(
            run.path, ranks.is_main, told.get("step", 0), told.get("seconds", 0.0), trackers_in(settings), settings
        ) as metrics,
        Interrupts() as interrupts,
    ):
        parts = Parts(present, average, ranks)
        yield metrics, KeptCheckpoints(plan, run, parts, settings, metrics, interrupts, told, saved, tokenizers)


class KeptCheckpoints(Checkpoints):
    """Those of a run by its command line. told: what _TRAINER_FILE of the checkpoint holds, saved: the settings in its
    manifest; both empty at the beginning."""

    def __init__(
        self,
        plan: CheckpointPlan,
        run: RunFolder,
        parts: Parts,
        settings: dict[str, Any],
        metrics: MetricsWriter,
        interrupts: Interrupts,
        told: dict[str, Any],
        saved: dict[str, Any],
        tokenizers: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan = plan
        self._run = run
        self._parts = parts
        self._settings = settings
        self._metrics = metrics
        self._interrupts = interrupts
        self._told = told
        self._saved = saved
        self._ranks = parts.ranks
        self._tokenizers = tokenizers or {}
        self._stop = 0
        self._step_began = time.monotonic()
        self._longest_step_seconds = 0.0
        self._save_seconds: float | None = None

    def restore(self) -> tuple[int, dict[str, Any]]:
        found = self._plan.found
        if found is None:
            return 0, {}
        if placement(self._saved) == placement(self._settings):
            self._parts.load(found)
        else:
            self._load_elsewhere(found)
        say(f"goes on after step {self._told['step']}, from {found}", self._ranks.is_main)
        self._step_began = time.monotonic()
        return self._told["step"], self._told["state"]

    def _load_elsewhere(self, found: Path) -> None:
        step, was, now = self._told["step"], placed(self._saved), placed(self._settings)
        say(f"{found} was written on {was}, and is converted for {now}", self._ranks.is_main)
        # Where generators begin anew, they do so otherwise than at the run's beginning, and alike each time.
        seed = derived_seed(self._settings.get("seed", 0), "resumed", step, self._ranks.world_size)
        self._parts.load_elsewhere(found, self._plan.folder.universal(step), self._saved["ranks"], seed)

    def due(self, step: int, total_steps: int) -> bool:
        flags = self._plan.flags
        self._stop = largest(self._asked_to_stop(), self._ranks.device)
        if step >= total_steps:
            self._stop = 0  # the run ends now anyway, with its model
            return flags.save_at_end
        return self._stop > 0 or (flags.save_every > 0 and step % flags.save_every == 0)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        started = time.monotonic()
        refusal = self._written(step, state)
        if refusal is not None:
            say(self._lament(step, refusal), self._ranks.is_main)
        self._step_began = time.monotonic()
        self._save_seconds = self._step_began - started
        if self._stop:
            say(self._farewell(step, refusal is None), self._ranks.is_main)
            raise SystemExit(0 if refusal is None else 1)

    def _written(self, step: int, state: Mapping[str, Any]) -> str | None:
        """Write and publish a checkpoint, or leave everything as it was and return what the disk refused."""
        folder, is_main = self._plan.folder, self._ranks.is_main
        refusals: list[str] = []
        if is_main:
            with noting(refusals):
                folder.begin(step, self._parts.engines)
        refusal = agreed(refusals) or self._parts.write(folder.partial(step))
        if refusal is None:
            if is_main:
                with noting(refusals):
                    self._publish(step, state)
            refusal = agreed(refusals)
        if refusal is not None and is_main:
            folder.give_up(step)
        return refusal

    def _publish(self, step: int, state: Mapping[str, Any]) -> None:
        self._metrics.flush()
        sizes = self._run.log_sizes()
        for name in sizes:
            flush_to_disk(self._run.path / name)
        told = {
            "step": step,
            "seconds": self._metrics.seconds,
            "log_sizes": sizes,
            "state": dict(state),
        }
        folder = self._plan.folder
        for name, tokenizer in self._tokenizers.items():
            if name in self._parts.engines:
                describe_engine(folder.partial(step), name, self._parts.engines[name], tokenizer)
        (folder.partial(step) / _TRAINER_FILE).write_text(json.dumps(told), encoding="utf-8")
        folder.publish(step, {"settings": self._settings})
        with contextlib.suppress(OSError):  # what is not removed now will be after the next one
            folder.prune(step, self._plan.flags.keep_last)

    def _asked_to_stop(self) -> int:
        """0, or why this rank is to stop: the signal's place in SIGNALS from 1 on, or the time."""
        now = time.monotonic()
        self._longest_step_seconds = max(self._longest_step_seconds, now - self._step_began)
        self._step_began = now
        for place, number in enumerate(SIGNALS, start=1):
            if self._interrupts.reason == number.name:
                return place
        limit = self._plan.flags.limit_seconds()
        if limit is None:
            return 0
        # One more step, and a checkpoint after it, each as long as the longest so far; a first checkpoint is a guess.
        save_seconds = self._longest_step_seconds if self._save_seconds is None else self._save_seconds
        needed = 1.5 * (self._longest_step_seconds + save_seconds)
        return _TIME_IS_SHORT if seconds_since_start() + needed > limit else 0

    def _lament(self, step: int, refusal: str) -> str:
        last = next(iter(self._plan.folder.latest_first()), None)
        return (
            f"warning: NO CHECKPOINT was written after step {step} ({refusal}); the run goes on, and "
            f"{'there is none to go on from yet' if last is None else f'the last good one is {last}'}; make room, or "
            "lower --keep_last"
        )

    def _farewell(self, step: int, with_checkpoint: bool) -> str:
        reason = f"--stop_before {self._plan.flags.stop_before}"
        if self._stop != _TIME_IS_SHORT:
            reason = SIGNALS[self._stop - 1].name
        if not with_checkpoint:
            reason += ", without its checkpoint"
        ranks = f"THREESTEP_RANKS={self._ranks.world_size} "
        config = shlex.quote(str(self._run.path / "config.yaml"))
        return (
            f"stopped after step {step} ({reason}); to go on: {ranks}python -m training.utils.run.launch "
            f"{self._plan.program} --config {config} --resume"
        )
