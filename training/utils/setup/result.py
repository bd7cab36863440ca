"""The result of a training loop. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainingResult:
    """before, after: the evaluations; None without evaluation rows
    summary: the run's closing figures
    sentence: the same in words, up to the seconds
    signs: that the run has diverged, to be put behind the last line; "" for none
    reports: further JSON files of the run's folder by name, written once the model is
    """

    before: Any
    after: Any
    summary: dict[str, float | None]
    sentence: str
    signs: str = ""
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
