"""Settings and samples in the forms that trackers take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

PROJECT = "threestep"  # in services that part runs by project
_COLUMNS = (
    "prompt", "sample", "response", "responses", "ground_truth", "reward", "scores", "margin", "loss", "check",
    "response_tokens", "ended", "uid",
)  # fmt: skip


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
