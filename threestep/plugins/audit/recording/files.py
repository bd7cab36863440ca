"""A record on disk. Knows no torch.

The names of axes are those of `schema`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from threestep.plugins.audit.reading import read_tensors
from threestep.plugins.audit.recording.numbers import check_state, check_tensors
from threestep.plugins.audit.recording.schema import (
    DESCRIPTION,
    FIGURES,
    OBJECTIVES,
    SCHEMA,
    SETTINGS,
    STATE,
    VERSION,
)
from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.base.reading import checked_json, text_if_there
from training.utils.base.storage import replace_file

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class RecordHead:
    """The content of record.json. settings, figures: by the names of the schema. trainer: name and version. digests:
    of a state's tensor, by its name in state.safetensors. model: its configuration. critic: `model` and `settings` of
    the critic, with those of its optimizer."""

    objective: str
    step: int
    ranks: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    trainer: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    critic: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """A record in memory. ranks: the tensors of each rank. state: by the names of the schema."""

    head: RecordHead
    ranks: list[Arrays]
    state: Arrays = field(default_factory=dict)


def rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def write_rank(folder: Path, rank: int, tensors: Mapping[str, np.ndarray]) -> None:
    """Write the tensors of one rank."""
    _write(folder / rank_file(rank), tensors)


def write_head(folder: Path, head: RecordHead, state: Mapping[str, np.ndarray] | None = None) -> None:
    """Write what one rank writes for all: record.json comes last, so a folder that has it is whole on that rank."""
    if state:
        _write(folder / STATE, state)
    content = {"schema": SCHEMA, "version": VERSION, **vars(head)}
    replace_file(folder / DESCRIPTION, json.dumps(content, indent=1) + "\n")


def write_record(folder: Path, record: StepRecord) -> None:
    """Write a whole record; ThreestepError for one that could not be read."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, tensors in enumerate(record.ranks):
        check_tensors(tensors, str(folder / rank_file(rank)))
        write_rank(folder, rank, tensors)
    write_head(folder, record.head, record.state)


def read_record(folder: Path) -> StepRecord:
    """Read a record; ThreestepError for one of another schema, with names that it does not have, or incomplete."""
    path = folder / DESCRIPTION
    text = text_if_there(path)
    if text is None:
        records = sorted(folder.glob("records/step_*"))
        if records:
            raise ThreestepError(f"{folder} is a run, not the record of a step; give one of its records: {records[0]}")
        raise ThreestepError(
            f"{folder} is not the record of a step: it has no {DESCRIPTION}; --record_steps 1,10 writes records to "
            "OUTPUT_DIR/records/step_000001 and so on (in step 3, to step_000001_update1 and so on)"
        )
    head = _head(text, str(path))
    ranks = [read_tensors(folder / rank_file(rank), "the tensors of one rank") for rank in range(head.ranks)]
    for rank, tensors in enumerate(ranks):
        check_tensors(tensors, str(folder / rank_file(rank)))
    state = read_tensors(folder / STATE) if os.path.lexists(folder / STATE) else {}
    check_state(state, str(folder / STATE))
    return StepRecord(head, ranks, state)


_PLAIN = {bool: "true or false", str: "words", float: "a number"}
_FITS: Mapping[type, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    float: lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST,
}
_LARGEST = 1e300  # of a setting: more overflows where it is squared


@dataclass(frozen=True)
class _SaidSchema:
    """The schema and version that a file names."""

    schema: Any = None
    version: Any = None


def _head(text: str, path: str) -> RecordHead:
    kind = checked_json(_SaidSchema, text, path)
    if kind.schema != SCHEMA or kind.version != VERSION:
        raise ThreestepError(
            f"{path} has schema {kind.schema}, version {kind.version}, but this threestep reads schema {SCHEMA}, "
            f"version {VERSION}; a newer record needs a newer threestep"
        )
    head: RecordHead = checked_json(RecordHead, text, path)
    if head.objective not in OBJECTIVES:
        raise ThreestepError(f"{path}: objective expects one of {', '.join(OBJECTIVES)}, got '{head.objective}'")
    if head.ranks < 1:
        raise ThreestepError(f"{path}: ranks expects 1 or more, got {head.ranks}")
    for group, known in (("settings", SETTINGS), ("figures", FIGURES)):
        for name in getattr(head, group):
            if name not in known:
                raise ThreestepError(f"{path}: unknown name '{name}' in {group}{nearest_names(name, known)}")
    if head.critic and not {"model", "settings"} <= head.critic.keys():
        raise ThreestepError(f"{path}: critic expects model and settings, got {', '.join(head.critic)}")
    for name, value in [*head.settings.items(), *head.critic.get("settings", {}).items()]:
        if name not in SETTINGS:
            raise ThreestepError(f"{path}: unknown name '{name}' in the critic's settings")
        check_setting(name, value, path)
    return head


def checked_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings; ThreestepError for a name or a value that a record does not have."""
    for name, value in settings.items():
        if name not in SETTINGS:
            raise ThreestepError(f"{where}: unknown name '{name}'{nearest_names(name, SETTINGS)}")
        check_setting(name, value, where)
    return dict(settings)


def check_setting(name: str, value: Any, where: str) -> None:
    """ThreestepError for a value that the setting cannot have."""
    kind, _ = SETTINGS[name]
    fits = isinstance(value, str) and value in kind if isinstance(kind, tuple) else _FITS[kind](value)
    if not fits:
        expected = f"one of {', '.join(kind)}" if isinstance(kind, tuple) else _PLAIN[kind]
        raise ThreestepError(f"{where}: {name} expects {expected}, got {value!r}")


def _write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, str(path))
