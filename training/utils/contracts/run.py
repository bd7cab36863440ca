"""Objects that look at a run or have a say in it, beside its trainer: checkpoints, the run's course, observers of steps
and of evaluations. Imports no torch.

A trainer holds the `StepObservers` of its run, and takes the steps that `each` yields. Of each optimizer step it
    calls `begin`, before the first forward that learns
    hands each model with its micro-batches to `watched`, and trains with what that returns
    calls `taken` after the step, with all that it knows of it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple


class Checkpoints:
    """Saves nothing: for a loop by itself, as in tests; `checkpoints.loop` has those of a run."""

    def restore(self) -> tuple[int, dict[str, Any]]:
        """Load the checkpoint that the run resumes from. Return how many steps are done, and the state that the loop
        gave to `save` then; 0 and nothing at the beginning of a run. A collective."""
        return 0, {}

    def ends(self, step: int) -> bool:
        """True if training ends after `step`, although steps are left: the same answer on every rank. To be called
        after the step, and again after an evaluation of it. A collective."""
        return False

    def due(self, step: int, total_steps: int) -> bool:
        """True if the loop must call `save` after `step`: the same answer on every rank. A collective."""
        return False

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint after `step`; if the run was asked to stop, end the program with code 0. `state` is the
        loop's own, as JSON holds it, the same on every rank. A collective."""

    def evaluated(self, step: int) -> None:
        """Note that the run was evaluated after `step` (0: before training), and its figures are written. `due` may
        then ask for a checkpoint, and `ends` for the end. A collective."""

    def load_final(self, step: int) -> dict[str, Any] | None:
        """At the end of the run, after `step`: load an earlier checkpoint whose weights the run ends with, if a plugin
        asks for one, and return the state that the loop gave to `save` then. A collective."""
        return None


class FinalWeights(NamedTuple):
    """Weights that a run ends with in place of the last ones: those of the checkpoint after `step`. why: such as "the
    best by its evaluations"."""

    step: int
    why: str


class RunCourse:
    """A say in a run's course; this one says nothing. Opened on all ranks, and called on the main rank alone, whose
    answers hold for all.

    keeps: checkpoints that stay beside those of --keep_last, at most
    judges: it may end training, or goes by evaluations; otherwise `evaluated`, `end_reason` and `final`, which cost a
        collective, are not called
    """

    keeps: int = 0
    judges: bool = False

    def check(self, run: Path, parts: Any, keeps: int) -> None:
        """ThreestepError for a run that could not end, before its first step. parts: what it trains and saves
        (`checkpoints.parts`). keeps: of all who have a say"""

    def resumed(self, state: Mapping[str, Any]) -> None:
        """Continue a run that resumes. state: as `state` returned it, beside that of others; none of a part that the
        run did not have"""

    def figures(self, step: int, figures: Mapping[str, float]) -> Mapping[str, float]:
        """Take the figures of a line of metrics.jsonl, before it is written; return further ones for it."""
        return {}

    def evaluated(self, step: int, figures: Mapping[str, float]) -> bool:
        """Take the figures of the evaluation after `step` (0: before training); return whether a checkpoint of it is to
        be written. ThreestepError where they lack what is needed."""
        return False

    def stop_reason(self) -> str | None:
        """Return why the run must stop now, with a checkpoint of this step; None: it continues. Called after every
        step."""
        return None

    def end_reason(self) -> str | None:
        """Return why training ends now, although steps are left; None: it continues."""
        return None

    def kept(self, step: int) -> int | None:
        """Return the step whose checkpoint stays, once that of `step` is written; None: none does."""
        return None

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of `step` holds of it, as JSON, by names of its own."""
        return {}

    def saved(self, step: int) -> None:
        """Note that a checkpoint of `step` was written."""

    def final(self, step: int) -> FinalWeights | None:
        """Return the weights that the run ends with, in place of those after `step`, its last one."""
        return None

    def other_folder(self, run: Path) -> Path | None:
        """Return a new folder for a checkpoint that the run's own folder refuses; None: there is none. OSError if that
        is refused too."""
        return None

    def write_refused(self, place: Path, save: Callable[[Path], None], refusal: OSError) -> Path | None:
        """Write a finished model that the disk refused at `place`, later or elsewhere, by save(its folder); return that
        folder. None: it is not written. ThreestepError where no place takes it."""
        return None


class ObservedRun(NamedTuple):
    """A run that begins. program: that trains, as `python -m` takes it. settings: every value by its flag's name.
    folder: of the run. ranks: its `Ranks`. chat, tokenizer: by which its conversations are written."""

    program: str
    settings: Mapping[str, Any]
    folder: Path
    ranks: Any
    chat: Any
    tokenizer: Any


@dataclass(frozen=True)
class StepTaken:
    """An optimizer step that has been taken. Each trainer adds what it knows of its own.

    kind: of the training, such as `sft`
    number: of the step as in metrics.jsonl; in step 3 of the rollout
    figures: of the step, over all ranks
    row_ids: returns the rows of the dataset that it learned from, on all ranks
    update: the number of the optimizer step in its rollout, from 1; None where there are no rollouts
    """

    kind: ClassVar[str] = ""

    number: int
    figures: Mapping[str, float]
    row_ids: Callable[[], Sequence[int]]
    update: int | None = field(default=None, kw_only=True)


class ObservedStep:
    """An optimizer step in the eyes of an observer; this one does nothing."""

    def watched(self, trainee: Any) -> Any:
        """Return a model in training (`engine.accumulate.Trainee`) with micro-batches that compute the same as its own.
        Called once for each model, before its first forward that learns."""
        return trainee

    def taken(self, step: StepTaken) -> None:
        """See the step, after it. A collective."""


NOT_OBSERVED = ObservedStep()


class StepObserver:
    """Looks at the steps of a run; this one at none."""

    def begin(self, number: int, update: int | None = None) -> ObservedStep:
        """Begin to look at an optimizer step. number, update: as of StepTaken."""
        return NOT_OBSERVED

    def around(self, number: int) -> AbstractContextManager[None]:
        """Return what is entered before a step's rows are made, in step 3 before its rollout, and left after all that
        follows the step. number: as of StepTaken."""
        return nullcontext()


class _SeenByEach(ObservedStep):
    def __init__(self, each: Sequence[ObservedStep]) -> None:
        self._each = each

    def watched(self, trainee: Any) -> Any:
        for observed in self._each:
            trainee = observed.watched(trainee)
        return trainee

    def taken(self, step: StepTaken) -> None:
        for observed in self._each:
            observed.taken(step)


class StepObservers(tuple[StepObserver, ...]):
    """The observers of one run."""

    __slots__ = ()

    def begin(self, number: int, update: int | None = None) -> ObservedStep:
        return _SeenByEach([observer.begin(number, update) for observer in self]) if self else NOT_OBSERVED

    def each(self, steps: Iterable[int]) -> Iterator[int]:
        """Yield the steps, and enter `around` of each observer until the next is requested, or the loop ends."""
        for step in steps:
            with ExitStack() as entered:
                for observer in self:
                    entered.enter_context(observer.around(step))
                yield step


class HeldOutRows(NamedTuple):
    """The rows that steps 1 and 2 evaluate. phase: their `PhaseData`. ends: tokens that end a response. media: of the
    rows, a `RunMedia`; None without any."""

    phase: Any
    ends: Sequence[int]
    media: Any


class EvaluatedRun(NamedTuple):
    """A run that is about to be evaluated.

    settings: by the flags' names
    folder: its `RunFolder`
    model: in training, a `WholeModel`; under ZeRO-3 each rank gathers a copy of it
    template: variables of the chat template, where the run's rows pass through it; None where they do not
    rows_per_batch: of an evaluation
    held_out: None in step 3
    """

    settings: Mapping[str, Any]
    folder: Any
    model: Any
    tokenizer: Any
    template: dict[str, Any] | None
    rows_per_batch: int
    held_out: HeldOutRows | None = None


class EvaluationObserver:
    """Sees the evaluations of a run. Every method is called on all ranks, and moves no random state of training."""

    def figures(self, step: int) -> Mapping[str, float]:
        """Return further figures of the evaluation after `step`, as `eval/NAME`: they are recorded beside its own, and
        a run can be judged by them. A collective."""
        return {}

    def wanted(self, *, around_training: bool) -> Sequence[int]:
        """Return the held-out rows of steps 1 and 2 whose scores `scored` takes, the same on all ranks.

        around_training: the evaluation is the one before training, or the one after it"""
        return ()

    def scored(self, scores: Mapping[int, Sequence[float]]) -> list[dict[str, Any]]:
        """Return samples of an evaluation, lines of samples.jsonl. A collective. scores: by the rows that are wanted,
        the loss of a sentence in nats a token, or those of ranked responses, best first"""
        return []

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Take an evaluation's samples, which samples.jsonl has."""

    def restored(self) -> None:
        """The weights of an earlier evaluation were loaded in place of the last ones. A collective."""


class EvaluationObservers(EvaluationObserver):
    """Several, in turn."""

    def __init__(self, observers: Sequence[EvaluationObserver]) -> None:
        self._observers = observers

    def figures(self, step: int) -> Mapping[str, float]:
        return {name: value for each in self._observers for name, value in each.figures(step).items()}

    def wanted(self, *, around_training: bool) -> Sequence[int]:
        found = (each.wanted(around_training=around_training) for each in self._observers)
        return list(dict.fromkeys(row for rows in found for row in rows))

    def scored(self, scores: Mapping[int, Sequence[float]]) -> list[dict[str, Any]]:
        return [sample for each in self._observers for sample in each.scored(scores)]

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for each in self._observers:
            each.samples(step, samples)

    def restored(self) -> None:
        for each in self._observers:
            each.restored()
