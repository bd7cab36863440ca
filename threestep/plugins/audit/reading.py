"""Tensors and settings of runs, from their files. A file that holds anything else is a ThreestepError."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.reading import checked_value, text_if_there
from training.utils.base.storage import parse_yaml

if TYPE_CHECKING:
    import numpy as np


def read_settings(path: Path) -> dict[str, Any]:
    """Return the mapping of a YAML file; an empty one if nothing has its name."""
    import yaml

    text = text_if_there(path)
    try:
        value = None if text is None else parse_yaml(text)
    except (ValueError, OverflowError, yaml.YAMLError) as problem:
        raise ThreestepError(f"{path} is not valid YAML: {first_line(problem)}") from problem
    return checked_value(dict[str, Any], {} if value is None else value, path)


def read_tensors(path: Path, what: str = "tensors") -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file, integers, booleans and floats up to 64 bits; ThreestepError for another
    file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        why = "is not a file" if os.path.lexists(path) else "is missing"
        raise ThreestepError(f"{path} {why}: expected {what}")
    try:
        return dict(load_file(str(path)))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as problem:
        raise ThreestepError(
            f"{path} is not a safetensors file of integers, booleans or floats up to 64 bits: {first_line(problem)}"
        ) from problem
