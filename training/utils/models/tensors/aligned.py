"""Weights that start at a cache line, as what torch allocates does."""

from __future__ import annotations

from torch import nn

_LINE = 64  # bytes: an AVX-512 register's, and torch's own alignment on a CPU (c10/core/alignment.h, gAlignment)


def align_weights(model: nn.Module) -> int:
    """Move weights on a CPU that start elsewhere, one by one, and return how many.

    Weights that a safetensors file holds in the model's own type stay where its header puts them, so that every read of
    a register crosses two lines: products of few rows take up to a tenth longer (docs/lab_book.md).
    """
    moved = 0
    for weight in model.parameters():
        if weight.device.type == "cpu" and weight.data_ptr() % _LINE:
            weight.data = weight.data.clone()
            moved += 1
    return moved
