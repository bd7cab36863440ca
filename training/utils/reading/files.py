"""Files of others as values of known types. A file that holds anything else is a ThreestepError: the file, the place in
it, what is expected there. Nothing that is read is executed or fetched.

Types are checked by pydantic, which comes with DeepSpeed. It is imported where a file is read, so `--help` does not
wait for it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.storage import parse_yaml

if TYPE_CHECKING:
    import numpy as np
    from pydantic import TypeAdapter, ValidationError

_MOST_CHARACTERS = 40  # of a wrong value, in an error


def read_bytes(path: Path) -> bytes:
    """Return what is in a file. ThreestepError for a folder and a pipe."""
    if not path.is_file():
        what = "is no file" if os.path.lexists(path) else "does not exist"
        raise ThreestepError(f"{path} expects a file, and {what}")
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ThreestepError(f"{path} cannot be read: {problem.strerror}") from problem


def read_text(path: Path) -> str:
    """Return the text of a file. ThreestepError for a folder, a pipe, and what is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ThreestepError(f"{path} expects a text in UTF-8, and byte {problem.start:,} is not of one") from problem


def text_if_there(path: Path) -> str | None:
    """Return the text of a file; None only if nothing has its name."""
    return read_text(path) if os.path.lexists(path) else None


def checked_json(kind: Any, text: str, where: object) -> Any:
    """Return a JSON text as a type: a class, a dataclass, `dict[str, float]`, ... ThreestepError for other values."""
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as problem:
        raise ThreestepError(_sentence(problem, where)) from problem


def checked_value(kind: Any, value: Any, where: object) -> Any:
    """Return a value of YAML or of a table as a type, or ThreestepError. Words of numbers and of truth are taken for
    these."""
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as problem:
        raise ThreestepError(_sentence(problem, where)) from problem


def read_settings(path: Path) -> dict[str, Any]:
    """Return the mapping of a YAML file; an empty one if nothing has its name."""
    import yaml

    text = text_if_there(path)
    try:
        value = None if text is None else parse_yaml(text)
    except (ValueError, OverflowError, yaml.YAMLError) as problem:
        raise ThreestepError(f"{path} expects YAML: {first_line(problem)}") from problem
    return checked_value(dict[str, Any], {} if value is None else value, path)


def read_tensors(path: Path, what: str = "tensors") -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file, integers, booleans and floats up to 64 bits; ThreestepError for another
    file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        why = "is no file" if os.path.lexists(path) else "is missing"
        raise ThreestepError(f"{path} expects {what}, and {why}")
    try:
        return dict(load_file(str(path)))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as problem:
        raise ThreestepError(
            f"{path} expects safetensors of integers, booleans or floats up to 64 bits: {first_line(problem)}"
        ) from problem


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _sentence(problem: ValidationError, where: object) -> str:
    """The first mistake, and how many there are."""
    mistakes = problem.errors(include_url=False, include_context=False)
    first, more = mistakes[0], len(mistakes) - 1
    place = ".".join(map(str, first["loc"]))
    said = first["msg"].replace("Input should be", "expects").replace("Field required", "is missing")
    said = said.replace("Invalid JSON", "expects JSON")
    got = "" if first["type"] in ("missing", "json_invalid") else f", got {ascii(first['input'])[:_MOST_CHARACTERS]}"
    others = f" (and {more:,} more)" if more else ""
    return f"{where}: {place}{' ' * bool(place)}{said}{got}{others}"
