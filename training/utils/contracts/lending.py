"""A trained model whose weights are lent to rollouts, or sent to where they are drawn. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Weights of a model by name, whole; each is valid until the next is requested.
Tensors = Iterator[tuple[str, "torch.Tensor"]]


class LowRank(NamedTuple):
    """Adapters' addition to a weight: scale * up_OR @ down_RI, transposed where `transposed`."""

    down_RI: torch.Tensor
    up_OR: torch.Tensor
    scale: float
    transposed: bool


# As Tensors, with adapters beside the weights that they are added to.
Parts = Iterator[tuple[str, "torch.Tensor | LowRank"]]


class Lender(Protocol):
    """A trained model, whose whole weights are lent to rollouts. Every rank must call its methods together.

    model: has shards in place of weights where `is_sharded`. updates: optimizer steps so far.
    trains_adapters_alone: nothing else changes, and `send_parts` may be called.
    """

    model: PreTrainedModel
    is_sharded: bool

    @property
    def trains_adapters_alone(self) -> bool: ...

    @property
    def updates(self) -> int: ...

    def lent(self) -> AbstractContextManager[PreTrainedModel]:
        """The model with whole weights."""

    def tensors(self) -> Tensors:
        """Every weight, whole, by its name."""

    def send(self, take: Callable[[Tensors], None]) -> None:
        """Have `take` take every weight on the first rank; the others wait for it."""

    def send_parts(self, take: Callable[[Parts], None], with_base: bool) -> None:
        """As `send`, the adapters by themselves. with_base: behind the weights that they are added to."""
