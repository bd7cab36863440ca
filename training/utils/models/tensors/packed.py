"""Linear layers whose frozen weight is kept in another form, and made whole each time it is read.

A plugin has such a layer as a class of its own; what reads weights asks here, and knows no form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from training.utils.models.tensors.weights import count_elements

if TYPE_CHECKING:
    import torch


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
