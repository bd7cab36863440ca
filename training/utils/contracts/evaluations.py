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
