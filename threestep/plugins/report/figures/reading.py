"""Reads what runs left in their folders, as far as it exists: an old or interrupted run has fewer files.

A folder is one step's (metrics.jsonl, config.yaml, ...) or a run of several steps with a folder for each.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from threestep.plugins.report.figures.rollout_account import rollout_account
from training.utils.base.credentials import redacted_value
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import parse_json, parse_yaml
from training.utils.flags.flags import chosen_in
from training.utils.flags.step import UNKNOWN_STEP, Step, known_steps, step_of
from training.utils.plugins.registry import added
from training.utils.run.run_folder import DIVERGENCE, read_rollouts

_FILES = ("metrics.jsonl", "config.yaml", "samples.jsonl")
_FIRST_PROMPTS, _EVALUATIONS = 3, 12  # shown of every evaluation
_MOST_LOGGED = 20  # warnings of a run's log
_LARGEST = 1e300  # larger values cannot be drawn either


@dataclass(frozen=True)
class RunReports:
    """Files that a step writes once, each as it is named. environment: device, versions, when it was started. harness:
    figures of lm-evaluation-harness on the step's model, by task."""

    environment: dict[str, Any] = field(default_factory=dict)
    data_report: dict[str, Any] = field(default_factory=dict)
    reward_report: dict[str, Any] = field(default_factory=dict)
    harness: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRun:
    """One step of a run; files that do not exist are empty.

    declaration: of the step that the settings belong to
    lines: of metrics.jsonl, in order
    samples: [("before", samples), ("after", samples)]: of samples.jsonl, from its first and its last evaluation
    first_prompts: samples of the first prompts, from every evaluation (from evenly spaced ones, if there are many)
    problems: a sentence for each file that could not be read in full, for each sign that the run has diverged, and for
        each warning of its log
    """

    run: str
    path: Path
    declaration: Step
    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    samples: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    first_prompts: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    reports: RunReports = RunReports()
    problems: tuple[str, ...] = ()

    @property
    def chosen(self) -> set[str]:
        """Names of the settings that the program chose."""
        return chosen_in(_text(self.path / "config.yaml"))

    @property
    def label(self) -> str:
        """The name of the run's method, e.g. `GRPO`."""
        return self.declaration.label_of(self.settings)

    @property
    def place(self) -> int:
        """Place among all steps; unknown ones come last."""
        return [*known_steps(), UNKNOWN_STEP.name].index(self.declaration.name)

    def points(self, name: str) -> list[tuple[float, float | None]]:
        """(step, value) of each line that has the metric; None if the value is not finite."""
        return [(line["step"], finite(line[name])) for line in self.lines if name in line]

    @property
    def names(self) -> list[str]:
        """Every metric, in the order of its first line."""
        metric_names = dict.fromkeys(name for line in self.lines for name in line)
        return [name for name in metric_names if name not in ("step", "seconds")]


@dataclass(frozen=True)
class ReportedRun:
    """Everything in one folder, under the name that the report gives it."""

    name: str
    path: Path
    steps: list[StepRun]
    summary: dict[str, Any]


class RunReader:
    """Reads runs' folders, and again as they grow: of metrics.jsonl and samples.jsonl only the appended lines."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
        self._names = dict(zip(paths, short_names(paths), strict=True))
        self._metrics: dict[Path, _Metrics] = {}
        self._samples: dict[Path, _Samples] = {}

    def read(self) -> list[ReportedRun]:
        """The runs as they are now. ThreestepError if a folder is missing or holds no run."""
        return [self._run(path, name) for path, name in self._names.items()]

    def _run(self, path: Path, name: str) -> ReportedRun:
        if not path.is_dir():
            raise ThreestepError(
                f"expected a run's folder (its --output_dir), but {path} is not a folder; pass an existing one"
            )
        folders = [path] if _is_step(path) else sorted(child for child in path.iterdir() if _is_step(child))
        steps = [self._step(folder, name) for folder in folders]
        if not steps:
            raise ThreestepError(
                f"{path} contains no run: neither it nor any of its subfolders contains any of {', '.join(_FILES)}; "
                "pass the --output_dir of a step or of all_steps"
            )
        return ReportedRun(name, path, sorted(steps, key=lambda step: step.place), _mapping(path / "summary.json", []))

    def _step(self, path: Path, run: str) -> StepRun:
        metrics = self._metrics.setdefault(path, _Metrics(path / "metrics.jsonl"))
        samples = self._samples.setdefault(path, _Samples(path / "samples.jsonl"))
        metrics.read_on()
        samples.read_on()
        accounts = rollout_account(read_rollouts(path))
        lost = [each.sentence() for each in accounts if not each.is_whole]
        signs = _signs(path / DIVERGENCE)
        logged = [text for text in _logged(path) if text not in signs][:_MOST_LOGGED]
        problems = [*metrics.problems, *samples.problems, *signs, *lost, *logged]
        config = _mapping(path / "config.yaml", problems, parse_yaml)
        settings = {str(name): redacted_value(value) for name, value in config.items()}
        for flag, words in added("advice", ()).items():
            if "page" in words and settings.get(flag):
                problems.append(words["page"].format(settings[flag]))
        summary = _mapping(path / "summary.json", problems)
        names = (each.name for each in fields(RunReports))
        reports = RunReports(**{name: _mapping(path / f"{name}.json", problems) for name in names})
        step = step_of(settings)
        evaluations = list(zip(step.figures.samples.labels, samples.first_and_last, strict=False))
        return StepRun(
            run,
            path,
            step,
            settings,
            list(metrics.lines),
            evaluations,
            samples.first_prompts,
            summary,
            reports,
            tuple(problems),
        )


def read_runs(folders: Sequence[str | Path]) -> list[ReportedRun]:
    """Read each folder once. ThreestepError if one is missing or holds no run."""
    return RunReader(folders).read()


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


def _is_step(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in _FILES)


class _GrowingLines:
    """The objects of a JSON-lines file that may grow; one that was cut or begun anew is read from its start again.

    Other lines, such as a killed run's last one, are counted in `problems`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at, self._identity = 0, (0, 0)
        self._bad = 0
        self._torn = b""  # a last line without its end: whole at the next reading, or torn for ever
        self._last_line = b""  # what was read last stands where it stood, unless the file was cut and grew again
        self.clear()

    def clear(self) -> None:
        """Forget every object."""

    def take(self, value: dict[str, Any]) -> None:
        """Add an object."""

    @property
    def problems(self) -> list[str]:
        bad = self._bad + bool(self._torn.strip())
        return [f"{self.path.name}: {bad} line{'s' if bad > 1 else ''} could not be read"] if bad else []

    def read_on(self) -> None:
        """Read the lines appended since the last time."""
        if not self.path.is_file():
            return self._begin()
        with open(self.path, "rb") as file:
            state = os.fstat(file.fileno())
            file.seek(self._at - len(self._last_line))
            if (state.st_dev, state.st_ino) != self._identity or file.read(len(self._last_line)) != self._last_line:
                self._begin()
                self._identity = (state.st_dev, state.st_ino)
            file.seek(self._at)
            for line in file:
                self._torn = b""
                value = _parsed(line.decode("utf-8", "replace"))
                if not line.endswith(b"\n") and not isinstance(value, dict):
                    self._torn = line
                    break
                self._at += len(line)
                self._last_line = line
                if isinstance(value, dict):
                    self.take(value)
                else:
                    self._bad += bool(line.strip())

    def _begin(self) -> None:
        self._at, self._bad, self._torn, self._last_line = 0, 0, b"", b""
        self.clear()


class _Metrics(_GrowingLines):
    """The lines that have a step."""

    def clear(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def take(self, value: dict[str, Any]) -> None:
        if finite(value.get("step")) is not None:
            self.lines.append(value)


class _Samples(_GrowingLines):
    """Samples of the first and the last `step`, and of the first prompts at the steps between: the file grows with
    every evaluation, and is not held whole."""

    def clear(self) -> None:
        self._first: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []
        self._between: list[list[dict[str, Any]]] = []  # of every _apart-th step
        self._apart, self._steps = 1, 0

    def take(self, value: dict[str, Any]) -> None:
        if value.get("greedy"):
            return  # a second response to the same prompt
        if not self._first or value.get("step") == self._first[0].get("step"):
            self._first.append(value)
            return
        if not self._last or value.get("step") != self._last[0].get("step"):
            if self._last and self._steps % self._apart == 0:
                self._between.append(self._last[:_FIRST_PROMPTS])
            self._last, self._steps = [], self._steps + 1
            if len(self._between) > _EVALUATIONS:
                self._between, self._apart = self._between[1::2], 2 * self._apart
        self._last.append(value)

    @property
    def first_and_last(self) -> list[list[dict[str, Any]]]:
        return [list(group) for group in (self._first, self._last) if group]

    @property
    def first_prompts(self) -> list[dict[str, Any]]:
        groups = (self._first[:_FIRST_PROMPTS], *self._between, self._last[:_FIRST_PROMPTS])
        return [sample for group in groups for sample in group]


def _signs(path: Path) -> list[str]:
    """The signs of divergence that a run noted."""
    lines = _text(path).splitlines()
    signs = [sign for sign in map(_parsed, lines) if isinstance(sign, dict)]
    return [f"step {sign.get('step')}: {sign.get('sentence')}" for sign in signs]


def _logged(folder: Path) -> list[str]:
    """The warnings of a run's log, without commas in numbers of steps, as `_signs` has them."""
    texts = [text for text in map(_parsed, _text(folder / "warnings.jsonl").splitlines()) if isinstance(text, str)]
    return [re.sub(r"^step [\d,]+:", lambda step: step[0].replace(",", ""), text) for text in texts]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _mapping(path: Path, problems: list[str], load: Callable[[str], Any] = parse_json) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = _parsed(path.read_text(encoding="utf-8", errors="replace"), load)
    if isinstance(value, dict):
        return value
    problems.append(f"{path.name} could not be read")
    return {}


def _parsed(text: str, load: Callable[[str], Any] = parse_json) -> Any:
    try:
        return load(text)
    except (ValueError, yaml.YAMLError):
        return None
