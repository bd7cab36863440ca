"""The contract of trackers: places other than metrics.jsonl that receive a run's metrics. One is one file with one
subclass of Tracker. With the forms in which they write samples and settings. Imports no torch."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COLUMNS = (
    "prompt", "sample", "response", "responses", "ground_truth", "reward", "scores", "margin", "loss", "check",
    "response_tokens", "ended", "uid",
)  # fmt: skip


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for.

    folder: of the run, which exists.
    settings: all flags by name, and what else a resumed run must have in common.
    samples: of an evaluation, as many as a tracker shall show.
    done_steps: of a resumed run, which continues the curves after them; 0 for a new one.
    known_as: the tracker's `known_as` when it was opened for the earlier part of a resumed run.
    """

    folder: Path
    settings: Mapping[str, Any]
    samples: int
    done_steps: int = 0
    known_as: str | None = None

    @property
    def name(self) -> str:
        """--run_name, or else the folder with its parent's name, e.g. quickstart/step1_sft."""
        return str(self.settings.get("run_name") or "/".join(self.folder.resolve().parts[-2:]).lstrip("/"))


class Tracker(ABC):
    """Receives a run's metrics, on rank 0 alone; its constructor opens it.

    A subclass imports its package in its constructor. It has `metrics`, and whatever else it has a use for. It may
    raise: at its opening that ends the run before the first step, later it is dropped with a warning.
    """

    known_as: str | None = None  # a service's name for the run, to be kept in the run's folder for its resume

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    @abstractmethod
    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record plain numbers at a step."""

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (optional)
        """Record some of a step's samples, as text."""

    def flush(self) -> None:  # noqa: B027 (optional)
        """Write everything to disk."""

    def close(self, ended_well: bool) -> None:  # noqa: B027 (optional)
        """End the run."""


def sample_table(samples: Sequence[Mapping[str, Any]], most: int) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of the first `most` samples: of those columns that any of them has, then each reward and
    what it returned. Prompts come in the same order in every evaluation. What is neither number nor text is JSON."""
    shown = samples[:most]
    values = dict.fromkeys(name for sample in shown for name in sample if name.startswith(("reward/", "check/")))
    columns = [*(name for name in _COLUMNS if any(name in sample for sample in shown)), *values]
    return columns, [[_cell(sample.get(name)) for name in columns] for sample in shown]


def _cell(value: Any) -> Any:
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else json.dumps(value, ensure_ascii=False, default=str)


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as trackers accept them: numbers, booleans and texts."""
    return {
        name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)
        for name, value in settings.items()
    }
