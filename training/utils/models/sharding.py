"""The size of a weight under ZeRO-3, which keeps a shard, or nothing, where the weight was."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a weight as a whole, sharded or not."""
    return getattr(weight, "ds_shape", weight.shape)


def count_elements(weights: Iterable[torch.Tensor]) -> int:
    """Return the elements of all `weights`, as wholes."""
    return sum(whole_shape(weight).numel() for weight in weights)
