"""Weights of a model that ZeRO-3 may have sharded: loaded in shards, gathered, read whole; and how many may be whole at
once or gathered ahead of their use, by the model's size and the device's memory. The figures behind the rule:
docs/reference/memory.md."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from training.utils.engine.config.config import DEEPSPEED_LIMITS
from training.utils.engine.ranks.collectives import largest
from training.utils.engine.ranks.devices import host_share
from training.utils.engine.ranks.startup import DTYPES, Ranks
from training.utils.models.one_precision import ROUNDED
from training.utils.models.weights import adapters_of, count_elements, packed_layers

if TYPE_CHECKING:
    from training.utils.contracts.lending import LowRank
    from training.utils.engine.config.arguments import EngineSettings

GATHER_ELEMENTS = 50_000_000  # weights gathered at once when all are read: 200 MB in float32
_MEMORY_SHARE = 0.1  # of a rank's memory, at most, for weights that are whole
_LEAST = 30_000_000  # DeepSpeed-Chat's limit


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


@contextlib.contextmanager
def born_sharded(config: dict[str, Any], zero_stage: int) -> Iterator[None]:
    """Inside, transformers' from_pretrained creates ZeRO-3 models sharded, with the buffers that it computes elsewhere;
    other stages change nothing."""
    if zero_stage != 3:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    alive = HfDeepSpeedConfig(config)  # transformers keeps a weak reference only
    try:
        with _buffers_unrounded():
            yield
    finally:
        del alive
        unset_hf_deepspeed_config()


@contextlib.contextmanager
def _buffers_unrounded() -> Iterator[None]:
    """Inside, `deepspeed.zero.Init` casts weights alone.

    It would cast every tensor that a model's constructor makes, rotary frequencies too (deepspeed 0.19,
    partition_parameters.py: zero_wrapper_for_fp_tensor_constructor): in bfloat16, angles of position 2,048 are off by
    radians.
    """
    import deepspeed

    original: Any = deepspeed.zero.Init

    class WeightsInit(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            overrides = [deepspeed.zero.DeepSpeedTensorOverride.device]
            super().__init__(*args, **{"tensor_overrides": overrides, **kwargs})

        def _post_init_method(self, module: torch.nn.Module) -> None:
            for weight in module.parameters(recurse=False):
                if weight.is_floating_point() and weight.dtype is not self.dtype and not hasattr(weight, "ds_id"):
                    setattr(weight, ROUNDED, True)
                    weight.data = weight.data.to(self.dtype)  # as DeepSpeed does at the other stages
            super()._post_init_method(module)

    deepspeed.zero.Init = WeightsInit
    try:
        yield
    finally:
        deepspeed.zero.Init = original


def full_tensors(model: nn.Module, zero_stage: int, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """See TrainingEngine.full_tensors. merged: False yields the weights without the adapters. Packed
    weights are yielded as they are read, with which the model computes."""
    adapters = adapters_of(model)
    names = [name for name, _ in model.named_parameters() if not adapters.holds(name)]
    for bucket in _buckets(model, names):
        parameters = [part for name in bucket for part in adapters.parameters_of(model, name)]
        with _gathered(parameters, zero_stage), torch.no_grad():
            for name in bucket:
                tensor = model.get_parameter(name).detach()
                yield adapters.plain_name(name), adapters.merged(model, name, tensor) if merged else tensor
    seen = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for layer_name, layer in packed_layers(model):
        seen |= {f"{layer_name}.{part}" for part, _ in layer.named_buffers()}
        name = f"{layer_name}.weight"
        whole_OI = adapters.merged(model, name, layer.weight) if merged else layer.weight
        yield adapters.plain_name(name), whole_OI.t() if layer.transposed else whole_OI
    for name, tensor in model.state_dict().items():
        if name not in seen and not adapters.holds(name):
            yield adapters.plain_name(name), tensor


def adapter_parts(model: nn.Module, zero_stage: int) -> Iterator[tuple[str, LowRank]]:
    """Yield (name of the weight in the plain model, what adapters add to it), valid until the next one is yielded. A
    collective under ZeRO-3."""
    for name, own, low_rank in adapters_of(model).low_rank(model):
        with _gathered(own, zero_stage):
            yield name, low_rank()


def _buckets(model: nn.Module, names: list[str]) -> Iterator[list[str]]:
    bucket: list[str] = []
    elements = 0
    for name in names:
        bucket.append(name)
        elements += count_elements([model.get_parameter(name)])
        if elements >= GATHER_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
    if bucket:
        yield bucket


def _gathered(parameters: list[nn.Parameter], zero_stage: int) -> contextlib.AbstractContextManager[Any]:
    if zero_stage != 3:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


@contextlib.contextmanager
def whole_weights(engine: Any, weights: list[nn.Parameter], zero_stage: int) -> Iterator[None]:
    """Inside, `weights` of a DeepSpeed engine are whole, to be read. A collective under ZeRO-3; no forward or backward
    of that engine may run inside."""
    if zero_stage == 3:
        release_gathered(engine)
    with _gathered(weights, zero_stage):
        yield
