"""ZeRO-3's weights: those that it has made whole, or is making whole, on this rank; and its limits, weights that it may
hold whole at once and gather ahead of their use, by the model's size and the device's memory. The figures behind the
rule: docs/scale.md."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from training.utils.engine.config.config import DEEPSPEED_LIMITS
from training.utils.engine.ranks.collectives import largest
from training.utils.engine.ranks.startup import DTYPES, Ranks
from training.utils.models.weights import count_elements

if TYPE_CHECKING:
    from training.utils.engine.config.arguments import EngineSettings


def release_gathered(engine: Any) -> None:
    """Wait until the weights of a DeepSpeed engine that are under way have arrived, and shard whole ones again.

    DeepSpeed gathers in the order of the last training step, ahead of use. A forward without gradients ends where that
    step began its backward, so that it leaves weights under way that nobody waits for (deepspeed 0.19,
    partitioned_param_coordinator.py: `reset_step` does, in the next forward), and others whole for that backward.
    Whoever gathers them meanwhile fails at the end ("Cannot partition a param in flight"), and later work has less
    memory. Not a collective: it waits for those that every rank has begun.
    """
    under_way = getattr(engine.module, "ds_inflight_param_registry", None)
    if under_way is None:
        return
    for handle in list(under_way.values()):
        handle.wait()
    under_way.clear()
    whole = [weight for weight in engine.module.parameters() if weight.ds_status.name == "AVAILABLE"]
    whole = [weight for weight in whole if not weight.ds_persist]  # too small to be sharded: never released
    if whole:
        whole[0].partition(param_list=whole)


def overwrite(weight: nn.Parameter, whole: torch.Tensor, is_sharded: bool) -> None:
    """Give a weight new values, which every rank has whole. A collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0, enabled=is_sharded):
        weight.data.copy_(whole)


_MEMORY_SHARE = 0.1  # of a rank's memory, at most, for weights that are whole
_LEAST = 30_000_000  # DeepSpeed-Chat's limit


@dataclass(frozen=True)
class ModelSizes:
    """Sizes in elements. block: the largest layer that a model repeats; module: the largest one without its parts."""

    weights: int
    block: int
    module: int


def model_sizes(model: nn.Module) -> ModelSizes:
    """The sizes of a model, whole, sharded or on the meta device."""
    module = max(count_elements(part.parameters(recurse=False)) for part in model.modules())
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    blocks = [count_elements(block.parameters()) for part in lists for block in part]
    return ModelSizes(count_elements(model.parameters()), max(blocks, default=module), module)


def zero3_limits(sizes: ModelSizes, element_bytes: int, memory_bytes: int | None, on_gpu: bool) -> dict[str, int]:
    """Return the keys of `zero_optimization` that limit ZeRO-3's gathering, in elements.

    memory_bytes: of a rank: of its GPU, or its share of the host's; None if unknown.

    Live: a block, and beside it the next one or the largest module; on a GPU no less than DeepSpeed's default; but no
    more than a tenth of the memory. Ahead: a block. DeepSpeed keeps weights beyond the live limit that are used again
    within its reuse distance, 1e9 by default, and gathers nothing ahead meanwhile, so that distance is the live limit.
    """
    live = sizes.block + max(sizes.block, sizes.module)
    if on_gpu:
        live = max(live, DEEPSPEED_LIMITS["stage3_max_live_parameters"])
    if memory_bytes is not None:
        live = max(_LEAST, min(live, int(_MEMORY_SHARE * memory_bytes / element_bytes)))
    live = max(1, min(live, sizes.weights))
    return {
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live,
        "stage3_prefetch_bucket_size": max(1, min(sizes.block, live)),
    }


def limits_of(model: nn.Module, settings: EngineSettings, ranks: Ranks) -> dict[str, int]:
    """`zero3_limits` for `model` on the rank with the least memory: ranks that gather in another order wait for each
    other for ever. A collective at stage 3; nothing at the others."""
    if settings.zero_stage != 3:
        return {}
    on_gpu = ranks.device.type == "cuda"
    memory_bytes = (
        torch.cuda.get_device_properties(ranks.device).total_memory if on_gpu else host_share(ranks.world_size)
    )
    least_bytes = -largest(-memory_bytes, ranks.device)
    return zero3_limits(model_sizes(model), DTYPES[settings.dtype].itemsize, least_bytes, on_gpu)


def host_share(world_size: int) -> int:
    """Bytes of this host's memory for each rank on it: as many as torchrun, accelerate or DeepSpeed's launcher set, or
    all `world_size`, if none does."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, int(ranks))
