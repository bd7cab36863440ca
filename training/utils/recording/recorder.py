"""The recorder that loops are given: it watches the micro-batches of the steps it was asked for, and writes records.

K micro-batches of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import training
from training.utils.base.console import log
from training.utils.base.disk_errors import disk_errors, in_words
from training.utils.base.errors import ThreestepError
from training.utils.recording.digests import DigestLog, StepDigest, StepNumbers
from training.utils.recording.files import RecordHead, check_tensors, rank_file, write_head, write_rank
from training.utils.recording.schema import CRITIC
from training.utils.recording.sequences import RowSequences, sequences_of
from training.utils.recording.states import StateWatch
from training.utils.run.run_folder import DIGESTS

if TYPE_CHECKING:
    from training.utils.engine.accumulate import MicroBatch, MicroLoss
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.run.run_arguments import RunArguments


@dataclass(frozen=True)
class WatchedBatch:
    """A micro-batch after its forward. read: float, the log-probabilities or scores that the model returned; None if it
    was not run. loss: its part of the step's."""

    sequences: RowSequences
    read: torch.Tensor | None
    loss: torch.Tensor


@dataclass(frozen=True)
class RecordContent:
    """head: of the whole step, the same on every rank. tensors: of this rank, by the names of the schema."""

    head: RecordHead
    tensors: Mapping[str, torch.Tensor]


Watched = dict[str, list[WatchedBatch]]  # by the name of the model
_NO_NUMBERS = StepNumbers()


@dataclass
class StepRecording:
    """An optimizer step that nobody asked to record: it watches nothing and writes nothing."""

    def watched(self, name: str, engine: TrainingEngine, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return the micro-batches, to be handed to `accumulate`. name: of the model, if a step trains several."""
        return micro_batches

    def note(self, **settings: Any) -> None:
        """Add settings to the record, by its names; those that are 0 or False are as good as absent."""

    def write(self, make: Callable[[Watched], RecordContent], numbers: StepNumbers = _NO_NUMBERS) -> None:
        """Write what `make` returns, after the step. numbers: for its digest."""


NOT_RECORDED = StepRecording()


@dataclass
class WatchedStep(StepRecording):
    """A step that is recorded in `folder`. keeps_values: gradients, weights and moments too, of the model that is
    trained and of the critic."""

    folder: Path
    ranks: Ranks
    keeps_values: bool = False
    _state: StateWatch | None = None
    _critic: StateWatch | None = None
    _seen: Watched = field(default_factory=dict)
    _settings: dict[str, Any] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)
    _read: torch.Tensor | None = None
    _refused: str = ""

    def watched(self, name: str, engine: TrainingEngine, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        self._hooks.append(engine.module.register_forward_hook(self._keep))
        self._seen[name] = []
        if name == "critic":
            if self.keeps_values:
                self._critic = StateWatch(engine, keeps=True)
                self._critic.start()
        elif self._state is None:
            self._state = StateWatch(engine, self.keeps_values)
            self._state.start()
        return [replace(each, loss=partial(self._watch, name, each)) if each.learns else each for each in micro_batches]

    def note(self, **settings: Any) -> None:
        self._settings |= {name: value for name, value in settings.items() if value}

    def _keep(self, module: Any, given: Any, output: Any) -> None:
        self._read = getattr(output, "logprobs_M", output).detach()

    def _watch(self, name: str, micro_batch: MicroBatch) -> MicroLoss:
        self._read = None
        found = micro_batch.loss()
        try:
            self._seen[name].append(
                WatchedBatch(
                    sequences_of(micro_batch.rows, keeps_media=self.keeps_values), self._read, found.loss.detach()
                )
            )
        except ThreestepError as problem:  # of rows that no record can hold: the run goes on
            self._refused = str(problem)
        self._read = None
        return found

    def write(self, make: Callable[[Watched], RecordContent], numbers: StepNumbers = _NO_NUMBERS) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._refused:
            log(f"warning: no record of this step: {self._refused}")
            return
        content, rank = make(self._seen), self.ranks.rank
        tensors = {name: _in_numpy(values) for name, values in content.tensors.items()}
        check_tensors(tensors, rank_file(rank))
        figures = {name: float(value) for name, value in content.head.figures.items() if np.isfinite(value)}
        trainer = {"name": "threestep", "version": training.__version__}
        head, state = content.head, self._state
        if state is not None:
            settings = {**state.settings(), **head.settings, **self._settings}
            head = replace(head, settings=settings, digests=state.digests, model=state.model())
        values = {} if state is None else {**state.values}
        if self._critic is not None:
            values |= {f"{CRITIC}{name}": value for name, value in self._critic.values.items()}
            head = replace(head, critic={"model": self._critic.model(), "settings": self._critic.settings()})
        head = replace(head, ranks=self.ranks.world_size, figures=figures, trainer=trainer)
        try:
            with disk_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_rank(self.folder, rank, tensors)
                if self.ranks.is_main:
                    write_head(self.folder, head, values)
        except OSError as problem:
            log(f"warning: no record of this step: the disk refuses {in_words(problem)}")
            return
        log(f"record of the step: {self.folder}", self.ranks.is_main)


@dataclass
class DigestedStep(StepRecording):
    """A step with a digest, and with a record if `record` writes one."""

    record: StepRecording
    digest: StepDigest

    def watched(self, name: str, engine: TrainingEngine, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return self.digest.watched(name, engine, self.record.watched(name, engine, micro_batches))

    def note(self, **settings: Any) -> None:
        self.record.note(**settings)

    def write(self, make: Callable[[Watched], RecordContent], numbers: StepNumbers = _NO_NUMBERS) -> None:
        self.record.write(make)
        self.digest.write(numbers)


@dataclass(frozen=True)
class StepRecords:
    """The steps that are recorded, and the folder. steps: counted as in metrics.jsonl. digests: of all steps, if they
    are written. keeps_values: of states too. explained: steps that are recorded with these in any case. on_gpus:
    digests also on a GPU, for which a step then waits. notes: settings of every record."""

    steps: frozenset[int] = frozenset()
    folder: Path = Path()
    digests: DigestLog | None = None
    keeps_values: bool = False
    on_gpus: bool = False
    explained: frozenset[int] = frozenset()
    notes: Mapping[str, Any] = field(default_factory=dict)

    def of_step(self, step: int, ranks: Ranks, update: int | None = None) -> StepRecording:
        """Return the recording of a step. update: the number of its optimizer step, from 1, if it has several."""
        part = "" if update is None else f"_update{update}"
        folder = self.folder / f"step_{step:06}{part}" if step in self.steps | self.explained else None
        keeps_values = self.keeps_values or step in self.explained
        recording = NOT_RECORDED if folder is None else WatchedStep(folder, ranks, keeps_values)
        recording.note(**self.notes)
        if self.digests is None or (ranks.device.type == "cuda" and not self.on_gpus):
            return recording
        return DigestedStep(recording, StepDigest(self.digests, ranks, step, update=update, record=folder))


def records_of(run: RunArguments, program: str = "") -> StepRecords:
    """Return the records and digests that the flags ask for. program: that trains, as `python -m` takes it."""
    folder = Path(run.output_dir)
    digests = None if run.digests is False else DigestLog(folder / DIGESTS, program)
    return StepRecords(
        frozenset(run.record_steps),
        folder / "records",
        digests,
        run.record_values,
        on_gpus=run.digests is True,
        explained=frozenset(run.explain_steps),
    )


def _in_numpy(values: torch.Tensor) -> np.ndarray:
    values = values.detach().cpu()
    return values.float().numpy() if values.dtype in (torch.bfloat16, torch.float16) else values.numpy()
