"""How many weights ZeRO-3 may hold whole at once, and how many it gathers ahead of their use, by the model's size and
the device's memory. The figures behind the rule: docs/scale.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.utils.models.sharding import count_elements

# DeepSpeed's own defaults (deepspeed 0.19, runtime/zero/config.py), in elements.
DEEPSPEED_LIVE = 1_000_000_000
DEEPSPEED_LIMITS = {
    "stage3_max_live_parameters": DEEPSPEED_LIVE,
    "stage3_max_reuse_distance": DEEPSPEED_LIVE,
    "stage3_prefetch_bucket_size": 50_000_000,
}
_MEMORY_SHARE = 0.1  # of a GPU's memory, at most, for weights that are whole
_LEAST = 30_000_000  # DeepSpeed-Chat's limit


@dataclass(frozen=True)
class ModelSizes:
    """In elements. block: the largest layer that a model repeats; module: the largest module without its parts."""

    weights: int
    block: int
    module: int


def model_sizes(model: nn.Module) -> ModelSizes:
    """The sizes of a model, whole, sharded or on the meta device."""
    module = max(count_elements(part.parameters(recurse=False)) for part in model.modules())
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    blocks = [count_elements(block.parameters()) for part in lists for block in part]
    return ModelSizes(count_elements(model.parameters()), max(blocks, default=module), module)


def zero3_limits(sizes: ModelSizes, element_bytes: int, gpu_bytes: float | None) -> dict[str, int]:
    """Return the keys of `zero_optimization` that limit what ZeRO-3 gathers, in elements.

    gpu_bytes: memory of a GPU; None on a CPU.

    Live: a block, and beside it the next one or the largest module; on a GPU no less than DeepSpeed's default and no
    more than a tenth of its memory. Ahead: a block. DeepSpeed keeps weights beyond the live limit that are used again
    within its reuse distance, 1e9 by default, and gathers nothing ahead meanwhile, so that distance is the live limit.
    """
    live = sizes.block + max(sizes.block, sizes.module)
    if gpu_bytes is not None:
        most = int(_MEMORY_SHARE * gpu_bytes / element_bytes)
        live = max(_LEAST, min(max(live, DEEPSPEED_LIVE), most))
    live = max(1, min(live, sizes.weights))
    return {
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live,
        "stage3_prefetch_bucket_size": max(1, min(sizes.block, live)),
    }


def limits_of(model: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """`zero3_limits` for `model` on `device`."""
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return zero3_limits(model_sizes(model), dtype.itemsize, gpu_bytes)
