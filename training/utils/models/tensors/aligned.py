"""Weights that start at a cache line, as what torch allocates does."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_LINE = 64  # bytes: an AVX-512 register's, and torch's own alignment on a CPU (c10/core/alignment.h, gAlignment)


def align_weights(model: nn.Module) -> int:
    """Move weights on a CPU that start elsewhere, one by one, and return how many. Those that share their memory with
    another stay.

    Weights that a safetensors file holds in the model's own type stay where its header puts them, so that reads of a
    register cross two lines: a step of few rows takes up to 7 % longer (docs/lab_book.md).
    """
    moved = 0
    shared = Counter(weight.untyped_storage().data_ptr() for weight in model.parameters())
    for weight in model.parameters():
        alone = shared[weight.untyped_storage().data_ptr()] == 1
        if alone and weight.device.type == "cpu" and weight.data_ptr() % _LINE:
            weight.data = weight.data.clone()
            moved += 1
    return moved
