"""A record on disk. Knows no torch.

The names of axes are those of `schema`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.base.storage import read_json_object, replace_file
from training.utils.recording.schema import (
    DESCRIPTION,
    FIGURES,
    OBJECTIVES,
    SCHEMA,
    SETTINGS,
    STATE,
    STATES,
    TENSORS,
    VERSION,
)

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
    content = read_json_object(str(path)) if path.is_file() else None
    if content is None:
        raise ThreestepError(
            f"{folder} expects the record of a step, a folder with {DESCRIPTION}, and has none; --record_steps 1,10 "
            "writes records to OUTPUT_DIR/records/step_000001 and so on"
        )
    head = _head(content, str(path))
    ranks = [_read(folder / rank_file(rank)) for rank in range(head.ranks)]
    for rank, tensors in enumerate(ranks):
        check_tensors(tensors, str(folder / rank_file(rank)))
    state = _read(folder / STATE) if (folder / STATE).is_file() else {}
    for name in state:
        if not name.startswith(tuple(STATES)):
            raise ThreestepError(f"{folder / STATE} expects names that begin with {', '.join(STATES)}, got '{name}'")
    return StepRecord(head, ranks, state)


def check_tensors(tensors: Mapping[str, np.ndarray], where: str) -> None:
    """ThreestepError for a tensor of another name, kind or length than the schema has."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, values in tensors.items():
        known = TENSORS.get(name)
        if known is None:
            raise ThreestepError(f"{where} has the unknown tensor '{name}'{nearest_names(name, TENSORS)}")
        if values.dtype.kind != known.kind or values.ndim != len(known.axis):
            raise ThreestepError(
                f"{where}: {name} expects {_KINDS[known.kind]} in {len(known.axis)} dimension(s) [{known.axis}], got "
                f"{values.dtype} {list(values.shape)}"
            )
        size, other = sizes.setdefault(known.axis[0], (len(values), name))
        if size != len(values):
            raise ThreestepError(f"{where}: {name} expects {size:,} entries, as {other} has, got {len(values):,}")
    for axis, lengths in (("T", "lengths"), ("R", "rollout_lengths")):
        if axis not in sizes:
            continue
        total = int(tensors[lengths].sum()) if lengths in tensors else None
        if total != sizes[axis][0]:
            raise ThreestepError(
                f"{where}: {sizes[axis][1]} expects {lengths} to add up to its {sizes[axis][0]:,} entries, got "
                f"{'no such tensor' if total is None else f'{total:,}'}"
            )


_PLAIN = {bool: "true or false", str: "words", float: "a number"}
_KINDS = {"i": "integers", "b": "booleans", "f": "floating-point numbers"}


def _head(content: Mapping[str, Any], path: str) -> RecordHead:
    if content.get("schema") != SCHEMA or content.get("version") != VERSION:
        raise ThreestepError(
            f"{path} expects schema {SCHEMA}, version {VERSION}, got schema {content.get('schema')}, version "
            f"{content.get('version')}; a record of a newer version needs a newer threestep"
        )
    head = RecordHead(**{name: content[name] for name in RecordHead.__dataclass_fields__ if name in content})
    if head.objective not in OBJECTIVES:
        raise ThreestepError(f"{path}: objective expects one of {', '.join(OBJECTIVES)}, got '{head.objective}'")
    for group, known in (("settings", SETTINGS), ("figures", FIGURES)):
        for name in getattr(head, group):
            if name not in known:
                raise ThreestepError(f"{path}: {group} has the unknown name '{name}'{nearest_names(name, known)}")
    for name, value in [*head.settings.items(), *head.critic.get("settings", {}).items()]:
        if name not in SETTINGS:
            raise ThreestepError(f"{path}: the critic's settings have the unknown name '{name}'")
        check_setting(name, value, path)
    return head


def checked_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings; ThreestepError for a name or a value that a record does not have."""
    for name, value in settings.items():
        if name not in SETTINGS:
            raise ThreestepError(f"{where} has the unknown name '{name}'{nearest_names(name, SETTINGS)}")
        check_setting(name, value, where)
    return dict(settings)


def check_setting(name: str, value: Any, where: str) -> None:
    """ThreestepError for a value that the setting cannot have."""
    kind, _ = SETTINGS[name]
    plain = {bool: bool, str: str}.get(kind, (int, float)) if isinstance(kind, type) else ()
    fits = value in kind if isinstance(kind, tuple) else isinstance(value, plain)
    if not fits:
        expected = f"one of {', '.join(kind)}" if isinstance(kind, tuple) else _PLAIN[kind]
        raise ThreestepError(f"{where}: {name} expects {expected}, got {value!r}")


def _write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, str(path))


def _read(path: Path) -> Arrays:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(str(path)))
    except FileNotFoundError:
        raise ThreestepError(
            f"{path} expects the tensors of one rank, and is missing: the record is incomplete"
        ) from None
    except (SafetensorError, KeyError) as problem:
        raise ThreestepError(
            f"{path} expects safetensors of integers, booleans or floats up to 64 bits: {problem}"
        ) from problem
