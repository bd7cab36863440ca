"""Model folders with weights that are not those of the model."""

from __future__ import annotations

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
