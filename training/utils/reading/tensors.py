"""Safetensors of others, for torch: of every type, with the notes beside them. See `files`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError, first_line

if TYPE_CHECKING:
    import torch


def torch_tensors(
    path: Path, names: Iterable[str] | None = None, others: Iterable[str] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of these names, all for None, those of `others` that are there, and the notes. ThreestepError
    for another file, and for a name that it lacks."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        what = "is no file" if os.path.lexists(path) else "does not exist"
        raise ThreestepError(f"{path} expects safetensors, and {what}")
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
