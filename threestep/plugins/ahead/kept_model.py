"""Copies of a model's weights, for rollouts that are drawn during training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from training.utils.engine.whole_model import filled

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.utils.engine.whole_model import WholeModel


def kept_model(lender: WholeModel) -> KeptModel:
    """Return a copy of the present weights. At most one of a model's is lent at a time. A collective under ZeRO-3."""
    weights = {name: tensor.detach().clone() for name, tensor in lender.tensors()}
    return KeptModel(lender.empty(), weights, lender.updates, lender.engine.ranks.is_main)


class KeptModel:
    """The weights of a model as they once were, lent as those of WholeModel are. Nothing here is a collective.

    model: a copy that is filled with `weights`, those of all names, while it is lent. updates: of the weights.
    """

    is_sharded = False
    trains_adapters_alone = False  # its weights are merged

    def __init__(
        self, model: PreTrainedModel, weights: Mapping[str, torch.Tensor], updates: int, is_main_rank: bool
    ) -> None:
        self.model, self.updates = model, updates
        self._weights, self._is_main_rank = weights, is_main_rank

    def lent_as(self, plain: PreTrainedModel) -> KeptModel:
        """Return the same weights, lent as another copy."""
        return KeptModel(plain, self._weights, self.updates, self._is_main_rank)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights.items()

    def send(self, take: Callable[[Iterator[tuple[str, torch.Tensor]]], None]) -> None:
        """Have `take` take every weight on the first rank; the others do not wait for it."""
        if self._is_main_rank:
            take(self.tensors())

    def send_parts(self, take: Callable[[Iterator[tuple[str, Any]]], None], with_base: bool) -> None:
        raise NotImplementedError("its weights are merged")

    @contextlib.contextmanager
    def lent(self) -> Iterator[PreTrainedModel]:
        """The model with these weights, in eval mode."""
        with filled(self.model, self.tensors()) as model:
            yield model
