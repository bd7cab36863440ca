"""The head in a checkpoint, for a model folder that is exported from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from threestep.plugins.mtp.folder import FOLDER, save_head
from threestep.plugins.mtp.reading import INSIDE
from training.utils.engine.checkpoint_files import engine_state

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def write_trained_head(
    checkpoint: Path, name: str, state: Mapping[str, torch.Tensor], dtype: torch.dtype, *, out: Path
) -> None:
    """Write the head that was trained beside engine `name`, or with it by one loss (then it is in its `state`), into
    the model folder `out`; nothing without one."""
    if (checkpoint / FOLDER).is_dir():
        head = {} if name == "critic" else engine_state(checkpoint / FOLDER)
    else:
        head = {key.removeprefix(f"{INSIDE}."): state[key] for key in state if key.startswith(f"{INSIDE}.")}
    if head:
        typed = {key: tensor.to(dtype) for key, tensor in head.items()}
        save_head(out, 1 + max(int(key.split(".")[1]) for key in head), typed)
