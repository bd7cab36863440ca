"""Reads what runs left in their folders, as far as it is there: an old or interrupted run has fewer files.

A folder is one step's (metrics.jsonl, config.yaml, ...) or a run of several steps with a folder for each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from training.utils.run.errors import ThreestepError

KINDS = ("sft", "reward", "dpo", "ppo", "other")  # in the order of a run
_FILES = ("metrics.jsonl", "config.yaml", "samples.jsonl")
# A kind is known by a metric that it alone has, or by one of its flags. The first that fits.
_METRICS_OF = (
    ("ppo", ("rollout/score", "eval/reward")),
    ("dpo", ("eval/reward_margin", "train/reward_margin")),
    ("reward", ("eval/score_gap", "train/accuracy")),
    ("sft", ("eval/perplexity", "train/token_accuracy")),
)
_FLAGS_OF = (
    ("ppo", ("actor_model_name_or_path",)),
    ("dpo", ("beta",)),
    ("reward", ("center_coef", "margin_scale")),
    ("sft", ("neftune_alpha",)),
)
_LARGEST = 1e300  # what is beyond it cannot be drawn either


@dataclass(frozen=True)
class StepRun:
    """One step of a run. lines: of metrics.jsonl, in order. samples: of samples.jsonl, those of its first and its last
    step. What is missing is empty. problems: a sentence for each file that could not be read whole."""

    run: str
    kind: str
    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    data_report: dict[str, Any] = field(default_factory=dict)
    reward_report: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def points(self, name: str) -> list[tuple[float, float | None]]:
        """(step, value) of each line that has the metric; None where the value is no finite number."""
        return [(line["step"], finite(line[name])) for line in self.lines if name in line]

    @property
    def names(self) -> list[str]:
        """Every metric, in the order of its first line."""
        found = dict.fromkeys(name for line in self.lines for name in line)
        return [name for name in found if name not in ("step", "seconds")]


@dataclass(frozen=True)
class Run:
    """Everything one folder holds. name: how the report calls it."""

    name: str
    path: Path
    steps: list[StepRun]
    summary: dict[str, Any]


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read each folder, the same one once. ThreestepError for one that is missing or holds no run."""
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    return [_read_run(path, name) for path, name in zip(paths, short_names(paths), strict=True)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The ends of the paths, as short as tells them apart."""
    parts = 1
    while parts < max((len(path.parts) for path in paths), default=1):
        if len({path.parts[-parts:] for path in paths}) == len(paths):
            break
        parts += 1
    return ["/".join(path.parts[-parts:]).replace("//", "/") for path in paths]


def finite(value: Any) -> float | None:
    """`value` as a float, or None where it is no number, or none that is finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < _LARGEST else None


def _read_run(path: Path, name: str) -> Run:
    if not path.is_dir():
        raise ThreestepError(f"expected a run's folder (its --output_dir), got {path}, which is none")
    folders = [path] if _is_step(path) else sorted(child for child in path.iterdir() if _is_step(child))
    steps = [_read_step(folder, name) for folder in folders]
    if not steps:
        raise ThreestepError(
            f"{path} holds no run: expected one of {', '.join(_FILES)} in it or in a folder of it; give the "
            "--output_dir of a step or of all_steps"
        )
    return Run(name, path, sorted(steps, key=lambda step: KINDS.index(step.kind)), _object(path / "summary.json")[0])


def _is_step(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in _FILES)


def _read_step(path: Path, run: str) -> StepRun:
    lines, bad_lines = _lines(path / "metrics.jsonl")
    numbered = [line for line in lines if finite(line.get("step")) is not None]
    samples, bad_samples = _first_and_last(path / "samples.jsonl")
    settings, bad_settings = _settings(path / "config.yaml")
    objects = {name: _object(path / f"{name}.json") for name in ("summary", "data_report", "reward_report")}
    problems = [bad_lines, bad_samples, bad_settings, *(problem for _, problem in objects.values())]
    return StepRun(
        run=run,
        kind=kind_of(numbered, settings),
        path=path,
        settings=settings,
        lines=numbered,
        samples=samples,
        problems=tuple(problem for problem in problems if problem),
        **{name: found for name, (found, _) in objects.items()},
    )


def kind_of(lines: Sequence[dict[str, Any]], settings: dict[str, Any]) -> str:
    """Which step wrote these, told from the names in them."""
    names = {name for line in lines for name in line}
    for kind, marks in _METRICS_OF:
        if names & set(marks):
            return kind
    return next((kind for kind, marks in _FLAGS_OF if settings.keys() & set(marks)), "other")


def _lines(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The objects of a JSON-lines file, and a sentence if some lines hold none, as the last of a killed run may."""
    bad: list[str] = []
    return list(_objects(path, bad)), _unread(path, bad)


def _first_and_last(path: Path) -> tuple[list[dict[str, Any]], str]:
    """As `_lines`, but of the first and the last `step` alone: the file grows with every evaluation."""
    bad: list[str] = []
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for sample in _objects(path, bad):
        if sample.get("greedy"):
            continue  # a second response to the same prompt
        if not first or sample.get("step") == first[0].get("step"):
            first.append(sample)
        elif last and sample.get("step") != last[0].get("step"):
            last = [sample]
        else:
            last.append(sample)
    return first + last, _unread(path, bad)


def _objects(path: Path, bad: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, one after the other; lines that hold none are added to `bad`."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            value = _parsed(line)
            if isinstance(value, dict):
                yield value
            elif line.strip():
                bad.append(line)


def _unread(path: Path, bad: list[str]) -> str:
    return f"{path.name}: {len(bad)} line{'s' if len(bad) > 1 else ''} could not be read" if bad else ""


def _object(path: Path) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        return {}, ""
    value = _parsed(path.read_text(encoding="utf-8", errors="replace"))
    return (value, "") if isinstance(value, dict) else ({}, f"{path.name} could not be read")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _settings(path: Path) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        return {}, ""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict):
        return {}, f"{path.name} could not be read"
    return {str(name): value for name, value in values.items()}, ""
