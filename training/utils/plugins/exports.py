"""A checkpoint that becomes a model folder, as `ProgramHooks` hand it to plugins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class ExportedModel(NamedTuple):
    """A model folder, `out`, that was made of a checkpoint. run: its folder. checkpoint: its name. part: of the models
    that the run trains, or `average`."""

    run: Path
    checkpoint: str
    part: str
    out: Path


class WriteBeside(Protocol):
    """Writes into the model folder `out` what was trained beside the model of engine `name`, or with it."""

    def __call__(
        self, checkpoint: Path, name: str, state: Mapping[str, torch.Tensor], dtype: torch.dtype, *, out: Path
    ) -> None: ...
