"""The log of rollouts, rollouts.jsonl of a run, read. Serves pages about runs, and schedules that are drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import Required, TypedDict  # of Python 3.12, which pydantic asks for

from training.utils.base.errors import ThreestepError
from training.utils.reading.files import checked_json
from training.utils.run.run_folder import ROLLOUTS


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a rollouts.jsonl, or of that in a run's folder; none where there is no such file."""
    path = path / ROLLOUTS if path.is_dir() else path
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = checked_json(_RolloutLine, line, path)
        except ThreestepError:  # the last one of a run that was killed, or a damaged one
            continue
        if value["prompts"] > 0 and value.keys() & {"unused", "rows"} and value.keys() & {"first", "positions"}:
            found.append(value)
    return found


class _RolloutLine(TypedDict, total=False):
    """A line as `training.step3_ppo.contracts.rollouts` writes it."""

    step: Required[int]
    prompts: Required[int]
    engine: str
    version: int
    first: int
    positions: list[int]
    versions: list[int]
    pending: list[int]
    asked: list[float]
    began: list[float]
    ended: list[float]
    waited: float
    trained: float
    servers: dict[str, dict[str, int | float | None]]
    rows: list[int]
    left_out: dict[str, list[int]]
    unused: str
