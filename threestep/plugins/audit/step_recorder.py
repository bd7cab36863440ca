"""The recorder of a run: it watches the micro-batches of the steps it was asked for, and writes records and digests.

K micro-batches of a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import training
from threestep.plugins.audit.kinds.table import kind_of
from threestep.plugins.audit.recording.content import RecordContent, Watched, WatchedBatch, step_numbers, with_losses
from threestep.plugins.audit.recording.digests import DigestLog, StepDigest
from threestep.plugins.audit.recording.files import RecordHead, check_tensors, rank_file, write_head, write_rank
from threestep.plugins.audit.recording.schema import CRITIC, DIGESTS
from threestep.plugins.audit.recording.sequences import sequences_of
from threestep.plugins.audit.recording.states import StateWatch
from threestep.plugins.audit.recording.template_prompts import own_prompt
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError, disk_errors, in_words
from training.utils.contracts.run import NOT_OBSERVED, ObservedStep, StepObserver

if TYPE_CHECKING:
    from training.utils.contracts.run import ObservedRun, StepTaken
    from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee
    from training.utils.engine.ranks.startup import Ranks


@dataclass
class WatchedStep(ObservedStep):
    """A step that is recorded in `folder`. keeps_values: gradients, weights and moments too, of the model that is
    trained and of the critic. notes: returns further settings of a step whose rows have responses."""

    folder: Path
    ranks: Ranks
    keeps_values: bool = False
    notes: Callable[[], Mapping[str, Any]] = dict
    _state: StateWatch | None = None
    _critic: StateWatch | None = None
    _seen: Watched = field(default_factory=dict)
    _others: dict[str, bool] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)
    _read: torch.Tensor | None = None
    _refused: str = ""

    def watched(self, trainee: Trainee) -> Trainee:
        name, engine = trainee.group, trainee.engine
        self._hooks.append(engine.module.register_forward_hook(self._keep))
        self._seen[name] = []
        self._others["other_critic_terms" if name == "critic" else "other_terms"] = any(
            guest.adds_to_loss for guest in trainee.guests
        )
        if name == "critic":
            if self.keeps_values:
                self._critic = StateWatch(engine, keeps=True)
                self._critic.start()
        elif self._state is None:
            self._state = StateWatch(engine, self.keeps_values)
            self._state.start()
        return with_losses(trainee, partial(self._watch, name))

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

    def taken(self, step: StepTaken) -> None:
        for hook in self._hooks:
            hook.remove()
        kind = kind_of(step.kind)
        refused = self._refused or ("" if kind else f"records do not support training of the kind '{step.kind}'")
        if kind is None or refused:
            log(f"warning: no record of this step: {refused}")
            return
        content, rank = kind.record(step, self._seen), self.ranks.rank
        tensors = {name: _in_numpy(values) for name, values in content.tensors.items()}
        check_tensors(tensors, rank_file(rank))
        head, values = self._head(content, self.notes() if kind.has_responses else {})
        try:
            with disk_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_rank(self.folder, rank, tensors)
                if self.ranks.is_main:
                    write_head(self.folder, head, values)
        except OSError as problem:
            log(f"warning: no record of this step, because it cannot be written: {in_words(problem)}")
            return
        log(f"recorded this step in {self.folder}", self.ranks.is_main)

    def _head(self, content: RecordContent, notes: Mapping[str, Any]) -> tuple[RecordHead, dict[str, np.ndarray]]:
        """The head of the record, and the values of the models' states."""
        figures = {name: float(value) for name, value in content.head.figures.items() if np.isfinite(value)}
        trainer = {"name": "threestep", "version": training.__version__}
        head, state = content.head, self._state
        if state is not None:
            noted = [*notes.items(), *content.notes.items(), *self._others.items()]
            given = {name: value for name, value in noted if value}
            head = replace(
                head,
                settings={**state.settings(), **head.settings, **given},
                digests=state.digests,
                model=state.model(),
            )
        values = {} if state is None else {**state.values}
        if self._critic is not None:
            values |= {f"{CRITIC}{name}": value for name, value in self._critic.values.items()}
            head = replace(head, critic={"model": self._critic.model(), "settings": self._critic.settings()})
        return replace(head, ranks=self.ranks.world_size, figures=figures, trainer=trainer), values


@dataclass
class DigestedStep(ObservedStep):
    """A step with a digest, and with a record if `record` writes one."""

    record: ObservedStep
    digest: StepDigest
    is_main: bool

    def watched(self, trainee: Trainee) -> Trainee:
        return self.digest.watched(self.record.watched(trainee))

    def taken(self, step: StepTaken) -> None:
        self.record.taken(step)
        kind = kind_of(step.kind)
        self.digest.write((step_numbers if kind is None else kind.numbers)(step, self.is_main))


@dataclass(frozen=True)
class StepRecorder(StepObserver):
    """Records some steps in folders of `folder`. steps: counted as in metrics.jsonl. digests: of all steps, if they are
    written. keeps_values: of states too. explained: steps that are recorded with these in any case. notes: as of
    WatchedStep."""

    ranks: Ranks
    folder: Path
    steps: frozenset[int] = frozenset()
    digests: DigestLog | None = None
    keeps_values: bool = False
    explained: frozenset[int] = frozenset()
    notes: Callable[[], Mapping[str, Any]] = dict

    def begin(self, number: int, update: int | None = None) -> ObservedStep:
        part = "" if update is None else f"_update{update}"
        folder = self.folder / f"step_{number:06}{part}" if number in self.steps | self.explained else None
        keeps_values = self.keeps_values or number in self.explained
        record = NOT_OBSERVED if folder is None else WatchedStep(folder, self.ranks, keeps_values, self.notes)
        if self.digests is None:
            return record
        digest = StepDigest(self.digests, self.ranks, number, update=update, record=folder)
        return DigestedStep(record, digest, self.ranks.is_main)


def open_recorder(run: ObservedRun) -> StepRecorder | None:
    """The recorder that a run's flags ask for (`Hooks.step_observer`); None: they ask for nothing."""
    settings, ranks = run.settings, run.ranks
    wanted = settings["digests"]
    has_digests = wanted is True or (wanted is None and ranks.device.type != "cuda")
    steps, explained = (frozenset(settings.get(name) or ()) for name in ("record_steps", "explain_steps"))
    if not (has_digests or steps or explained):
        return None
    return StepRecorder(
        ranks,
        run.folder / "records",
        steps,
        DigestLog(run.folder / DIGESTS, run.program) if has_digests else None,
        settings["record_values"],
        explained,
        functools.cache(lambda: {"template_prompt": own_prompt(run.chat, run.tokenizer)}),
    )


def _in_numpy(values: torch.Tensor) -> np.ndarray:
    values = values.detach().cpu()
    return values.float().numpy() if values.dtype in (torch.bfloat16, torch.float16) else values.numpy()
