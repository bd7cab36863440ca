"""The size of a weight under ZeRO-3, which keeps a shard, or nothing, where the weight was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a weight as a whole, sharded or not."""
    return getattr(weight, "ds_shape", weight.shape)


def count_elements(weights: Iterable[torch.Tensor]) -> int:
    """Return the elements of all `weights`, as wholes."""
    return sum(whole_shape(weight).numel() for weight in weights)


def send_from_first_rank(modules: Iterable[nn.Module | None]) -> None:
    """Give the weights of `modules` the first rank's values on every rank. A sharded model has them already."""
    if not torch.distributed.is_initialized():
        return
    for module in modules:
        for weight in module.parameters() if module is not None else ():
            if not hasattr(weight, "ds_id"):
                torch.distributed.broadcast(weight.data, src=0)


@contextlib.contextmanager
def whole_to_change(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, `weights` are whole, and every rank changes them in the same way; ZeRO-3's are then sharded again. For a
    model that no engine owns yet. A collective."""
    sharded = [weight for weight in weights if hasattr(weight, "ds_id")]
    if sharded:
        sharded[0].all_gather(param_list=sharded)  # type: ignore[attr-defined]  # DeepSpeed adds it to the weight
    try:
        yield
    finally:
        if sharded:
            sharded[0].partition(param_list=sharded, has_been_updated=True)  # type: ignore[attr-defined]


@contextlib.contextmanager
def whole_where_used(model: nn.Module) -> Iterator[None]:
    """Inside, a ZeRO-3 model that no engine owns yet can run forwards: each module's weights are gathered for its
    forward, a transformer block's together. Other models are left alone. A collective."""
    owned: dict[nn.Module, list[nn.Parameter]] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside:
            continue
        is_block = isinstance(module, GradientCheckpointingLayer)
        if is_block:
            inside.update(module.modules())
        weights = [weight for weight in module.parameters(recurse=is_block) if hasattr(weight, "ds_id")]
        if weights:
            owned[module] = weights

    def gather(module: nn.Module, *_: Any) -> None:
        weights = owned[module]
        weights[0].all_gather(param_list=weights)  # type: ignore[attr-defined]  # DeepSpeed adds it to the weight

    def release(module: nn.Module, *_: Any) -> None:
        weights = owned[module]
        weights[0].partition(param_list=weights, has_been_updated=False)  # type: ignore[attr-defined]

    with contextlib.ExitStack() as hooks:
        for module in owned:
            hooks.callback(module.register_forward_pre_hook(gather).remove)
            hooks.callback(module.register_forward_hook(release).remove)
        yield
