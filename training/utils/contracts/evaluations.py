"""The contract of who sees a run's evaluations beside its trainer: further figures, the samples. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class EvaluationObserver:
    """Sees the evaluations of a run. Every method is called on all ranks, and moves no random state of training."""

    def figures(self, step: int) -> Mapping[str, float]:
        """Return further figures of the evaluation after `step`, as `eval/NAME`: they are recorded beside its own, and
        a run can be judged by them. A collective."""
        return {}

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

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for each in self._observers:
            each.samples(step, samples)

    def restored(self) -> None:
        for each in self._observers:
            each.restored()
