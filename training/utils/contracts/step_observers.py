"""Step observers: features that look at the optimizer steps of a run and change none, which its trainer need not know.

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
