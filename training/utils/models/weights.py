"""A model's weights, whatever form they are kept in: shards of ZeRO-3, packed layers and adapters of plugins.

Under ZeRO-3 a shard, or nothing, is where the weight was. A `PackedLinear` keeps its frozen weight in another form and
makes it whole each time it is read. `Adapters` train beside a model's own weights (`ModelPreparer.add_adapters`); the
model keeps its class, so that other rooms treat it like any model. What reads weights asks here, and knows no plugin.

DeepSpeed 0.19.0 rounds buffers with the weights when it takes a model (engine.py: _configure_distributed_model); later
versions do not.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from training.utils.contracts.lending import LowRank


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


class PackedLinear(nn.Linear):
    """A linear layer (or transformers' Conv1D) without a parameter `weight`: its parts are buffers, and its forward
    computes what `nn.Linear` does with `weight`.

    kind: its name in `packed_layers` of `Plugin.tables`
    dtype: of `weight`
    transposed: it was a Conv1D, whose weight is [I, O]
    absent: while not None, `weight` is this, and the layer's output does not change
    """

    kind: ClassVar[str]
    dtype: torch.dtype
    transposed: bool
    absent: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """[O, I], made whole each time it is read."""
        return self.whole(self.dtype) if self.absent is None else self.absent

    @property
    def form(self) -> str:
        """The form in words, such as those of `ModelPreparer.weights_form`."""
        raise NotImplementedError

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [O, I] in `dtype`."""
        raise NotImplementedError

    def described(self, names: list[str]) -> dict[str, Any]:
        """Return what a checkpoint says of the layers of this kind, of these names, as JSON: an entry called `kind`,
        and more."""
        raise NotImplementedError


def packed_layers(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Yield (name, layer) for every layer whose weight is kept in another form."""
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield name, module


def packed_elements(model: nn.Module) -> int:
    """Return how many weights of `model` are kept in another form, which are none of its parameters."""
    return sum(layer.out_features * layer.in_features for _, layer in packed_layers(model))


def count_weights(model: nn.Module) -> int:
    """Return how many weights `model` has, sharded and packed ones included."""
    return count_elements(model.parameters()) + packed_elements(model)


def described_layers(model: nn.Module) -> Mapping[str, Any]:
    """Return what a checkpoint says of the packed layers of `model`, as JSON."""
    by_kind: dict[str, dict[str, PackedLinear]] = {}
    for name, layer in packed_layers(model):
        by_kind.setdefault(layer.kind, {})[name] = layer
    facts: dict[str, Any] = {}
    for layers in by_kind.values():
        facts |= next(iter(layers.values())).described(list(layers))
    return facts


_ATTRIBUTE = "_threestep_adapters"  # of each layer that has some


class Adapters:
    """The adapters of a model, which is handed to each function; this one has none.

    learning_rate: of their own; None: the model's
    """

    learning_rate: float | None = None

    def holds(self, name: str) -> bool:
        """Return whether the tensor of this name is theirs."""
        return False

    def plain_name(self, name: str) -> str:
        """Return the name of one of the model's own weights in the plain model."""
        return name

    def parameters_of(self, model: nn.Module, name: str) -> list[nn.Parameter]:
        """Return the parameters that make up the merged weight of this name: itself, and those of its adapters."""
        return [model.get_parameter(name)]

    def merged(self, model: nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight of this name, which is `weight`, with its adapters. Under ZeRO-3, gather `parameters_of`
        first."""
        return weight

    def train_alone(self, model: nn.Module) -> bool:
        """Return whether nothing but what `low_rank` describes is trained."""
        return False

    def low_rank(self, model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], Callable[[], LowRank]]]:
        """Yield a weight's name in the plain model, the parameters of what is added to it, and a function that returns
        it once these are gathered."""
        yield from ()

    def off(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Inside, the model computes without them."""
        return contextlib.nullcontext()

    def describe(self, model: PreTrainedModel, folder: Path) -> None:
        """Write to a checkpoint's description what puts them on the plain model again (`AdapterEntry.described`)."""

    def save(self, model: PreTrainedModel, folder: Path, base: Path) -> None:
        """Write them alone, for other programs. base: the folder of the model without them"""
        raise NotImplementedError


NO_ADAPTERS = Adapters()


def adapters_of(model: nn.Module) -> Adapters:
    """Return the adapters of a model, of a part of it, or of a module around it."""
    found = (getattr(module, _ATTRIBUTE, None) for module in model.modules())
    return next((adapters for adapters in found if adapters is not None), NO_ADAPTERS)


def mark_adapted(layer: nn.Module, adapters: Adapters) -> None:
    """Have `adapters_of` find the adapters that a layer has got."""
    setattr(layer, _ATTRIBUTE, adapters)


def adapters_off(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, `model` computes without its adapters."""
    return adapters_of(model).off(model)
