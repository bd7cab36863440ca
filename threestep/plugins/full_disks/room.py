"""The room that a run needs on its disk, reckoned before it trains."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.models.weights import whole_shape

if TYPE_CHECKING:
    from torch import nn

    from training.utils.checkpoints.parts import CheckpointParts


@dataclass(frozen=True)
class RoomNeeded:
    """Bytes: of all models that the run ends with, and of one checkpoint."""

    models: int
    checkpoint: int


def check_room(output_dir: Path, settings: Mapping[str, Any], parts: CheckpointParts, kept_beside: int) -> None:
    """Compare the bytes that the run will write with those that are free. ThreestepError if its models do not fit, or
    no checkpoint beside them; a warning if fewer checkpoints fit than the flags keep.

    kept_beside: checkpoints that stay beside those of --keep_last, at most (`RunCourse.keeps`)
    """
    free = free_bytes(output_dir)
    if free is None:
        return
    needed, keep_last = room_needed(parts), settings["keep_last"]
    there = _size_of(output_dir / "checkpoints")  # of a run that is resumed: some of those that stay
    saves = settings["save_every"] > 0 or settings["save_epochs"] > 0 or kept_beside > 0
    least = needed.checkpoint if saves or settings["save_at_end"] else 0
    if free + there < needed.models + least:
        also = f" and {in_gigabytes(least)} for a checkpoint" if least else ""
        raise ThreestepError(
            f"--output_dir {output_dir} has {in_gigabytes(free)} free, but this run needs "
            f"{in_gigabytes(needed.models)} for its model{also}; free up space, or choose a folder on another disk"
        )
    if not saves:
        return
    # A new checkpoint is written before the oldest is removed.
    kept = keep_last + 1 + kept_beside if keep_last else 2
    wanted = needed.models + kept * needed.checkpoint
    if free + there < wanted:
        log(
            f"warning: {output_dir} has {in_gigabytes(free)} free, but this run will need "
            f"{in_gigabytes(wanted - there)}: {in_gigabytes(needed.models)} for its model and "
            f"{in_gigabytes(needed.checkpoint)} for each of {kept} checkpoints (--keep_last {keep_last}, and the one "
            "being written); checkpoints that do not fit are skipped, so free up space, or lower --keep_last"
        )


def room_needed(parts: CheckpointParts) -> RoomNeeded:
    """Reckon it from the weights: those of each engine are a model, and a checkpoint has them with Adam's two moments
    in float32 and, where they train in half precision, their float32 copies. Tokenizers and logs are not counted."""
    models = states = 0
    for name, engine in parts.engines.items():
        weights = list(engine.module.parameters())
        size = _bytes_of(weights)
        models += size if name in parts.tokenizers else 0
        trained = [weight for weight in weights if weight.requires_grad]
        elements = sum(whole_shape(weight).numel() for weight in trained)
        states += size + 8 * elements + sum(4 * whole_shape(w).numel() for w in trained if w.element_size() < 4)
    for _ in parts.others:
        models += _bytes_of(parts.engines[next(iter(parts.engines))].module.parameters())
    return RoomNeeded(models, states)


def _bytes_of(weights: Iterable[nn.Parameter]) -> int:
    return sum(whole_shape(weight).numel() * weight.element_size() for weight in weights)


def free_bytes(path: Path) -> int | None:
    """Return the bytes that a user may still write below `path`, or below its nearest existing parent; None if the file
    system does not report them."""
    try:
        usage = shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists()))
    except (OSError, StopIteration):
        return None
    return usage.free if usage.total else None


def in_gigabytes(size_bytes: int) -> str:
    """ "1.2 GB", of 1e9 bytes each; small sizes in MB."""
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:,.1f} MB"


def _size_of(folder: Path) -> int:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return size
