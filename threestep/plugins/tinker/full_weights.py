"""All weights of a model as one client's vector, in place of adapters.

P weights, C clients of a forward, which is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from training.utils.base.errors import ThreestepError
from training.utils.base.reading import torch_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILE = "model.safetensors"


class FullLayout(NamedTuple):
    """shapes: of each weight, by its name; a tied one stands once. save: writes a model folder with such weights."""

    shapes: tuple[tuple[str, torch.Size], ...]
    save: Callable[[Path, Mapping[str, torch.Tensor]], None]

    @property
    def size(self) -> int:
        """P."""
        return sum(shape.numel() for _, shape in self.shapes)

    @property
    def shares_rows(self) -> bool:
        """False: a forward has one client's weights."""
        return False

    def pieces(self, weights_P: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each weight: views of the vector."""
        parts = weights_P.split([shape.numel() for _, shape in self.shapes])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes, parts, strict=True)}

    def write(self, folder: Path, weights_P: torch.Tensor, base: str) -> None:
        """Write a model folder."""
        pieces = self.pieces(weights_P.detach().cpu())
        self.save(folder, {name: piece.contiguous() for name, piece in pieces.items()})

    def read(self, folder: Path) -> torch.Tensor:
        """Return the vector of a folder that `write` wrote. ThreestepError for another one."""
        return vector_in(folder / _FILE, dict(self.shapes))


def vector_in(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> torch.Tensor:
    """Return the tensors of a file one behind the other. ThreestepError unless they are floats of these shapes."""
    tensors, _ = torch_tensors(path, shapes)
    for name, shape in shapes.items():
        if tensors[name].shape != shape or not tensors[name].is_floating_point():
            got = f"{tensors[name].dtype} {list(tensors[name].shape)}"
            raise ThreestepError(f"{path}: {name} expects floats {list(shape)}, got {got}")
    return torch.cat([tensors[name].flatten() for name in shapes])


def full_layout(model: PreTrainedModel) -> FullLayout:
    """Return the layout of a model's weights, as it was loaded."""

    def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        model.save_pretrained(folder, state_dict=dict(tensors), max_shard_size="1000GB")

    return FullLayout(tuple((name, weight.shape) for name, weight in model.named_parameters()), save)


def vector_of(model: PreTrainedModel, dtype: torch.dtype) -> torch.Tensor:
    """Return the model's own weights, [P]."""
    return torch.cat([weight.detach().flatten().to(dtype) for _, weight in model.named_parameters()])


@contextlib.contextmanager
def weights_of(model: PreTrainedModel, layout: FullLayout, weights_P: torch.Tensor) -> Iterator[None]:
    """Inside, the model computes with these weights in place of its own, and gradients reach them."""
    pieces = layout.pieces(weights_P.to(model.dtype))
    own = {id(weight): pieces[name] for name, weight in model.named_parameters()}
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            for name, weight in list(module._parameters.items()):
                if weight is not None:  # a tied one stands in several modules
                    swapped.append((module._parameters, name, weight))
                    module._parameters[name] = own[id(weight)]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, weight in swapped:
            parameters[name] = weight
