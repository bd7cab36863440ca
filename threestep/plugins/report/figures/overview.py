"""Facts of a run for the top of its page: model, data, device, duration, versions, and the settings that are not
defaults. Plain texts, not yet escaped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from threestep.plugins.report.figures.numbers import duration
from threestep.plugins.report.figures.reading import ReportedRun, StepRun, finite
from training.utils.base.storage import read_json_object

# Shown elsewhere, or settings of the machinery that have no effect on the trained model.
_ELSEWHERE = ("program", "output_dir", "config", "resume", "data_path", "report", "report_to")
_MODEL_FLAG = "model_name_or_path"
_LONGEST_VALUE = 120  # characters


def facts_of(run: ReportedRun) -> list[tuple[str, str]]:
    """(name, text) of each fact of the whole run that its files hold."""
    steps = run.steps
    facts = [
        ("Model", _joined(_models(steps[0]))),
        ("Data", _joined(_distinct(_data(step) for step in steps))),
        ("Rows", _joined(_rows(step, len(steps) > 1) for step in steps)),
        ("Device", _joined(_distinct(str(step.reports.environment.get("device", "")) for step in steps))),
        ("Duration", _duration(run)),
        ("Started", _joined(str(step.reports.environment.get("started", "")) for step in steps[:1])),
        ("Versions", _joined(_distinct(_versions(step) for step in steps))),
    ]
    return [(name, text) for name, text in facts if text]


def changed_settings(step: StepRun) -> list[tuple[str, str, str]]:
    """(setting, value, default) of each setting that a user set to other than its flag's default; models and data stand
    elsewhere."""
    defaults = step.declaration.defaults
    changed = []
    for name, value in sorted(step.settings.items()):
        if name in defaults and name not in (*_ELSEWHERE, *step.chosen) and _MODEL_FLAG not in name:
            if not _same(value, defaults[name]):
                changed.append((name, value_text(value), value_text(defaults[name])))
    return changed


def value_text(value: Any) -> str:
    """A setting as one writes it; of a path its last part, as a page is shown to others."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        text = " ".join(value_text(one) for one in value) or "none"
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    text = PurePath(text).name if text.startswith("/") else text
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def given_text(word: str) -> str:
    """An object that a Python program gave, in words; "" for the path or address of anything else."""
    path = Path(word.rpartition(":")[2])
    if path.parent.name != "given":  # the folder in a run's that `threestep.running` writes them to
        return ""
    if not path.name.endswith(_MODEL_FLAG):
        return "rows in memory" if path.stem in ("given_rows", "rows") else ""
    kinds = (read_json_object(str(path / "config.json")) or {}).get("architectures")
    return f"a loaded model{f' ({kinds[0]})' if isinstance(kinds, list) and kinds else ''}"


def progress_of(step: StepRun) -> tuple[int, float]:
    """(last optimizer step, seconds) that metrics.jsonl names; zeros without one."""
    if not step.lines:
        return 0, 0.0
    return int(max(line["step"] for line in step.lines[-1:])), finite(step.lines[-1].get("seconds")) or 0.0


def _models(step: StepRun) -> list[str]:
    """The models of the run's first step, by its flags."""
    models = []
    for name, value in step.settings.items():
        if name.endswith(_MODEL_FLAG) and value:
            role = name.removesuffix(_MODEL_FLAG).strip("_")
            text = given_text(str(value)) or value_text(value)
            models.append(f"{text} ({role})" if role else text)
    return _distinct(models)


def _data(step: StepRun) -> str:
    value = step.settings.get("data_path")
    words = value if isinstance(value, list) else [value] if value else []
    return ", ".join(given_text(str(word)) or _address(str(word)) for word in words)


def _address(word: str) -> str:
    """`jsonl:/home/me/rows.jsonl` as `jsonl:rows.jsonl`."""
    kind, colon, path = word.partition(":")
    return f"{kind}:{PurePath(path).name}" if colon and "/" in path and "://" not in word else value_text(word)


def _rows(step: StepRun, several: bool) -> str:
    counts = []
    for split, name in (("train", "training"), ("eval", "held out")):
        report = step.reports.data_report.get(split)
        number = finite(report.get("rows")) if isinstance(report, dict) else None
        counts += [] if number is None else [f"{number:,.0f} {name}"]
    return (f"{step.label}: " if several and counts else "") + ", ".join(counts)


def _duration(run: ReportedRun) -> str:
    whole = sum(
        finite(run.summary.get(f"seconds_{step.declaration.kind}")) or progress_of(step)[1] for step in run.steps
    )
    ends = [f"{step.label} {progress_of(step)[0]:,} steps" for step in run.steps if step.lines]
    return f"{duration(whole)} ({', '.join(ends)})" if whole else ""


def _versions(step: StepRun) -> str:
    versions = step.reports.environment.get("versions")
    return ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else ""


def _same(value: Any, default: Any) -> bool:
    """A list that is empty is none; 1 and 1.0 are the same number, 1 and true are not."""
    if value in (None, [], "") and default in (None, [], "", ()):
        return True
    if isinstance(value, bool) != isinstance(default, bool):
        return False
    numbers = finite(value), finite(default)
    if isinstance(value, str) and numbers[1] is not None:  # YAML reads 1e-5 as a text
        try:
            numbers = float(value), numbers[1]
        except ValueError:
            return False
    if None not in numbers:
        return numbers[0] == numbers[1]
    return (
        list(value) == list(default)
        if isinstance(default, (list, tuple)) and isinstance(value, list)
        else value == default
    )


def _distinct(texts: Any) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def _joined(texts: Sequence[str] | Any) -> str:
    return "; ".join(text for text in texts if text)
