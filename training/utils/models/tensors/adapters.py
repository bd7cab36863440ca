"""Adapters: what a plugin puts on a model's layers (`ModelPreparer.add_adapters`), to train beside their own weights.

A model with adapters keeps its class, so that other rooms treat it like any model. What reads weights asks here, and
knows no kind of adapters.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from training.utils.contracts.rollout_engine import LowRank

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
