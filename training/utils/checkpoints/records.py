"""Records that a checkpoint holds as JSON, compared with those of this version of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import parse_json

_Record = TypeVar("_Record")
_REMEDY = "resume with the version of Threestep that wrote the checkpoint"


def check_keys(saved: Any, known: Collection[str], what: str, optional: Collection[str] = ()) -> None:
    """ThreestepError that names the keys of `saved` that are neither `known` nor `optional`, or the known ones that it
    lacks. what: the part of a checkpoint that it is"""
    if not isinstance(saved, Mapping):
        raise ThreestepError(f"--resume: {what} is no table of {', '.join(sorted(known))}; {_REMEDY}")
    if unknown := sorted(saved.keys() - {*known, *optional}):
        raise ThreestepError(
            f"--resume: {what} holds {', '.join(unknown)}, which this version does not know; {_REMEDY}"
        )
    if missing := sorted(set(known) - saved.keys()):
        raise ThreestepError(f"--resume: {what} lacks {', '.join(missing)}, which this version writes; {_REMEDY}")


def read_record(path: Path) -> Any:
    """The JSON in a file of a checkpoint. ThreestepError where it is none."""
    with as_written(str(path)):
        return parse_json(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def as_written(what: str) -> Iterator[None]:
    """Inside, ThreestepError for a record of another form, or a missing one."""
    try:
        yield
    except FileNotFoundError as problem:
        raise ThreestepError(f"--resume: there is no {what}; {_REMEDY}") from problem
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as problem:
        reason = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
        raise ThreestepError(f"--resume: {what} is not what this version writes ({reason}); {_REMEDY}") from problem


def record_of(make: Callable[..., _Record], saved: Mapping[str, Any], what: str) -> _Record:
    """The record that a dataclass, or its inverse of `asdict`, makes of its fields in `saved`. ThreestepError that
    names a field that it does not know, or that is missing."""
    try:
        return make(**saved)
    except TypeError as problem:  # of the constructor: an unexpected keyword argument, a missing one
        reason = str(problem).partition("() ")[2] or problem
        raise ThreestepError(f"--resume: {what} is not what this version writes ({reason}); {_REMEDY}") from problem
