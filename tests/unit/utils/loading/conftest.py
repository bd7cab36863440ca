"""Model folders whose weights or settings are changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def changed_folder(save_folder: Callable[..., str]) -> Callable[..., str]:
    """Save a folder as `save_folder` does, its tensors changed; returns the folder."""

    def save(change: Callable[[Tensors], Tensors], **changes: Any) -> str:
        folder = save_folder(**changes)
        file = Path(folder) / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        save_file(change(tensors), file, {"format": "pt"})
        return folder

    return save


def edit_json(path: str | Path, **changes: Any) -> None:
    """Change entries of a file; None takes one out."""
    values = {**json.loads(Path(path).read_text()), **changes}
    Path(path).write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
