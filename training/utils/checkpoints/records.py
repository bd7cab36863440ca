"""Records that a checkpoint holds as JSON, compared with what this version of the program knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from training.utils.base.errors import ThreestepError

_Record = TypeVar("_Record")
_REMEDY = "resume with the version of Threestep that wrote the checkpoint"


def check_keys(saved: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """ThreestepError that names the keys of `saved` that are not `known`. what: the part of a checkpoint that it is"""
    if unknown := sorted(saved.keys() - set(known)):
        raise ThreestepError(
            f"--resume: {what} holds {', '.join(unknown)}, which this version does not know; {_REMEDY}"
        )


def record_of(make: Callable[..., _Record], saved: Mapping[str, Any], what: str) -> _Record:
    """The record that a dataclass, or its inverse of `asdict`, makes of its fields in `saved`. ThreestepError that
    names a field that it does not know, or that is missing."""
    try:
        return make(**saved)
    except TypeError as problem:  # of the constructor: an unexpected keyword argument, a missing one
        reason = str(problem).partition("() ")[2] or problem
        raise ThreestepError(f"--resume: {what} is not what this version writes ({reason}); {_REMEDY}") from problem
