"""What a real forward keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable

import torch


def kept_bytes(model: torch.nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that `forward`, by `model`, keeps beside the weights."""
    kept = {}
    weights = {part.untyped_storage().data_ptr() for part in [*model.parameters(), *model.buffers()]}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in kept.values())
