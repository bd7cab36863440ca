"""Files of others as values of known types. A file that holds anything else is a ThreestepError: the file, the place in
it, what is expected there. Nothing that is read is executed or fetched.

Types are checked by pydantic, which comes with DeepSpeed. It is imported where a file is read, so `--help` does not
wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError, first_line

if TYPE_CHECKING:
    import torch
    from pydantic import TypeAdapter, ValidationError

_MOST_CHARACTERS = 40  # of a wrong value, in an error


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raise ThreestepError for a folder or a pipe."""
    _check_file(path, "a file")
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ThreestepError(f"{path} cannot be read: {problem.strerror}") from problem


def _check_file(path: Path, expected: str) -> None:
    if not path.is_file():
        what = "is no file" if os.path.lexists(path) else "does not exist"
        raise ThreestepError(f"{path} expects {expected}, and {what}")


def read_text(path: Path) -> str:
    """Return the text of a file. Raise ThreestepError for a folder, a pipe, or content that is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ThreestepError(f"{path} is not UTF-8 text: byte {problem.start:,} is invalid") from problem


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
    """Return a value of YAML or a table as a type, or ThreestepError. Words of numbers and truth may be these."""
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as problem:
        raise ThreestepError(_sentence(problem, where)) from problem


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


def torch_tensors(
    path: Path, names: Iterable[str] | None = None, others: Iterable[str] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of these names, all for None, those of `others` that are there, and the notes. ThreestepError
    for another file, and for a name that it lacks."""
    from safetensors import SafetensorError, safe_open

    _check_file(path, "safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            known = set(file.keys())
            wanted = known if names is None else {*names}
            found = {name: file.get_tensor(name) for name in known & (wanted | {*others})}
            notes = dict(file.metadata() or {})
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError) as problem:
        raise ThreestepError(f"{path} expects safetensors: {first_line(problem)}") from problem
    if lacking := sorted(wanted - known):
        raise ThreestepError(f"{path} lacks the tensor {lacking[0]}")
    return found, notes
