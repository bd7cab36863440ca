"""Reads what runs left in their folders, as far as it exists: an old or interrupted run has fewer files.

A folder is one step's (metrics.jsonl, config.yaml, ...) or a run of several steps with a folder for each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from training.utils.run.errors import ThreestepError
from training.utils.run.step import UNKNOWN_STEP, Step, known_steps, step_of

_FILES = ("metrics.jsonl", "config.yaml", "samples.jsonl")
_LARGEST = 1e300  # larger values cannot be drawn either


@dataclass(frozen=True)
class StepRun:
    """One step of a run; files that do not exist are empty.

    declaration: of the step that the settings belong to
    lines: of metrics.jsonl, in order
    samples: [("SFT", samples), ("PPO", samples)]: of samples.jsonl, from the first evaluation and the last other one
    problems: a sentence for each file that could not be read in full
    """

    run: str
    path: Path
    declaration: Step
    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    samples: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    data_report: dict[str, Any] = field(default_factory=dict)
    reward_report: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def place(self) -> int:
        """Among all steps; unknown ones come last."""
        return [*known_steps(), UNKNOWN_STEP.name].index(self.declaration.name)

    def points(self, name: str) -> list[tuple[float, float | None]]:
        """(step, value) of each line that has the metric; None if the value is not finite."""
        return [(line["step"], finite(line[name])) for line in self.lines if name in line]

    @property
    def names(self) -> list[str]:
        """Every metric, in the order of its first line."""
        found = dict.fromkeys(name for line in self.lines for name in line)
        return [name for name in found if name not in ("step", "seconds")]


@dataclass(frozen=True)
class ReportedRun:
    """Everything in one folder, under the name that the report gives it."""

    name: str
    path: Path
    steps: list[StepRun]
    summary: dict[str, Any]


def read_runs(folders: Sequence[str | Path]) -> list[ReportedRun]:
    """Read each folder once. ThreestepError if one is missing or holds no run."""
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    return [_read_run(path, name) for path, name in zip(paths, short_names(paths), strict=True)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The ends of the paths, as short as keeps them distinct."""
    parts = 1
    while parts < max((len(path.parts) for path in paths), default=1):
        if len({path.parts[-parts:] for path in paths}) == len(paths):
            break
        parts += 1
    return ["/".join(path.parts[-parts:]).replace("//", "/") for path in paths]


def finite(value: Any) -> float | None:
    """`value` as a float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < _LARGEST else None


def _read_run(path: Path, name: str) -> ReportedRun:
    if not path.is_dir():
        raise ThreestepError(f"expected a run's folder (its --output_dir), got {path}, which is not a folder")
    folders = [path] if _is_step(path) else sorted(child for child in path.iterdir() if _is_step(child))
    steps = [_read_step(folder, name) for folder in folders]
    if not steps:
        raise ThreestepError(
            f"{path} holds no run: expected one of {', '.join(_FILES)} in it or in a folder of it; give the "
            "--output_dir of a step or of all_steps"
        )
    return ReportedRun(name, path, sorted(steps, key=lambda step: step.place), _mapping(path / "summary.json", []))


def _is_step(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in _FILES)


def _read_step(path: Path, run: str) -> StepRun:
    problems: list[str] = []
    lines = [line for line in _objects(path / "metrics.jsonl", problems) if finite(line.get("step")) is not None]
    evaluations = _first_and_last(_objects(path / "samples.jsonl", problems))
    config = _mapping(path / "config.yaml", problems, yaml.safe_load)
    settings = {str(name): value for name, value in config.items()}
    reports = {name: _mapping(path / f"{name}.json", problems) for name in ("summary", "data_report", "reward_report")}
    step = step_of(settings)
    samples = list(zip(step.sample_labels, evaluations, strict=False))
    return StepRun(run, path, step, settings, lines, samples, problems=tuple(problems), **reports)


def _first_and_last(samples: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Those of the first and the last `step` alone: the file grows with every evaluation."""
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for sample in samples:
        if sample.get("greedy"):
            continue  # a second response to the same prompt
        if not first or sample.get("step") == first[0].get("step"):
            first.append(sample)
        elif last and sample.get("step") != last[0].get("step"):
            last = [sample]
        else:
            last.append(sample)
    return [group for group in (first, last) if group]


def _objects(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; other lines, such as a killed run's last one, are counted in `problems`."""
    if not path.is_file():
        return
    bad = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            value = _parsed(line)
            if isinstance(value, dict):
                yield value
            else:
                bad += bool(line.strip())
    if bad:
        problems.append(f"{path.name}: {bad} line{'s' if bad > 1 else ''} could not be read")


def _mapping(path: Path, problems: list[str], load: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = _parsed(path.read_text(encoding="utf-8", errors="replace"), load)
    if isinstance(value, dict):
        return value
    problems.append(f"{path.name} could not be read")
    return {}


def _parsed(text: str, load: Callable[[str], Any] = json.loads) -> Any:
    try:
        return load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None
