"""Weights and buffers as torch holds them: their size under ZeRO-3, which keeps a shard, or nothing, where the weight
was; weights that start at a cache line, as what torch allocates does; and buffers, such as rotary frequencies, in the
precision that their family computes them in, mostly float32.

DeepSpeed 0.19.0 rounds buffers with the weights when it takes a model (engine.py: _configure_distributed_model); later
versions do not."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

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


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Inside, `module` may be cast; after, each buffer has the dtype and the values that it had, on its new device."""
    were = [
        (owner, name, buffer.detach())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    yield
    for owner, name, was in were:
        now = owner._buffers.get(name)
        if now is not None and now.dtype is not was.dtype:
            owner._buffers[name] = was.to(now.device)


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
