"""A model with whole weights on one rank, for code that runs many forwards: rollouts.

Below ZeRO-3 that is the trained module itself. Under ZeRO-3 it is a copy, made when it is first lent, filled by
gathering the weights and emptied afterwards: one gather per rollout, not one per token. A rollout engine that takes
tensor by tensor (`tensors`) needs no copy, and no rank ever holds a whole one.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.initialization import no_init_weights

from training.utils.engine.ranks.collectives import barrier
from training.utils.engine.zero3 import adapter_parts, full_tensors
from training.utils.models.weights import adapters_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.engine.training_engine import TrainingEngine


class WholeModel:
    """Lends `model`, which `engine` trains, in eval mode with whole weights.

    model: itself sharded under ZeRO-3, with its adapters if it has any
    """

    def __init__(self, engine: TrainingEngine, model: PreTrainedModel) -> None:
        self.engine = engine
        self.model = model
        self.is_sharded = engine.settings.zero_stage == 3  # each rank holds only a part of the trained weights
        self._copy: PreTrainedModel | None = None

    @property
    def updates(self) -> int:
        """Optimizer steps so far."""
        return self.engine.updates

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See TrainingEngine.full_tensors: at most one bucket of whole weights at a time."""
        return self.engine.full_tensors(self.model)

    def send(self, take: Callable[[Iterator[tuple[str, torch.Tensor]]], None]) -> None:
        """Have `take` take all `tensors` on the first rank; the others wait for it. A collective."""
        self._hand(take, self.tensors())

    @property
    def trains_adapters_alone(self) -> bool:
        return adapters_of(self.model).train_alone(self.model)

    def send_parts(self, take: Callable[[Iterator[tuple[str, Any]]], None], with_base: bool) -> None:
        """As `send`, the adapters by themselves. with_base: behind the weights that they are added to."""
        stage = self.engine.settings.zero_stage
        base = full_tensors(self.model, stage, merged=False) if with_base else ()
        self._hand(take, itertools.chain(base, adapter_parts(self.model, stage)))

    def _hand(self, take: Callable[[Iterator[tuple[str, Any]]], None], tensors: Iterator[tuple[str, Any]]) -> None:
        if self.engine.ranks.is_main:
            take(tensors)
        for _ in tensors:  # gathered by all ranks together
            pass
        barrier()

    @contextlib.contextmanager
    def lent(self) -> Iterator[PreTrainedModel]:
        """A collective under ZeRO-3: all ranks enter together."""
        if not self.is_sharded:
            was_training = self.model.training
            self.model.eval()
            try:
                yield self.model
            finally:
                self.model.train(was_training)
            return
        with filled(self.empty(), ((name, tensor.detach().clone()) for name, tensor in self.tensors())) as plain:
            yield plain

    def empty(self) -> PreTrainedModel:
        """Return the copy, always the same, which has no weights until it is filled (`filled`)."""
        if self._copy is None:
            self._copy = empty_copy(self.model, self.engine)
        return self._copy


@contextlib.contextmanager
def filled(plain: PreTrainedModel, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[PreTrainedModel]:
    """Inside, `plain`, an empty copy, has these tensors for its weights, and their numbers in its buffers."""
    targets = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for name, tensor in tensors:
        target = targets[name]
        if isinstance(target, torch.nn.Parameter):
            target.data = tensor
        else:
            target.copy_(tensor)
    plain.tie_weights()
    try:
        yield plain
    finally:
        for parameter in plain.parameters():
            parameter.data = parameter.data.new_empty(0)


def empty_copy(model: PreTrainedModel, engine: TrainingEngine) -> PreTrainedModel:
    """Return the same architecture without adapters; its weights take no memory until they are lent, not even here."""
    plain: Any
    with torch.device("meta"), no_init_weights():
        plain = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    plain.eval()
    _put_empty_weights(plain, engine.ranks.device)
    adapters = adapters_of(model)
    for name, buffer in model.named_buffers():
        if not adapters.holds(name):
            owner, _, leaf = adapters.plain_name(name).rpartition(".")
            plain.get_submodule(owner)._buffers[leaf] = buffer.detach().clone()
    return plain


def _put_empty_weights(plain: PreTrainedModel, device: torch.device) -> None:
    """Replace weights on the meta device, which cannot be filled, by ones without elements. Tied ones stay one."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in plain.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if weight not in made:
                empty = torch.empty(0, dtype=weight.dtype, device=device)
                made[weight] = torch.nn.Parameter(empty, requires_grad=False)
            module._parameters[name] = made[weight]
