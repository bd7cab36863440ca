"""A model with whole weights on one rank, for code that runs many forwards: rollouts.

Below ZeRO-3 that is the trained module itself. Under ZeRO-3 it is a copy, made when it is first lent, filled by
gathering the weights and emptied afterwards: one gather per rollout, not one per token. A rollout engine that takes
tensor by tensor (`tensors`) needs no copy, and no rank ever holds a whole one. Weights are kept at any stage where
rollouts are drawn while training goes on.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.initialization import no_init_weights

from training.utils.engine.ranks.collectives import barrier
from training.utils.engine.training_engine import adapter_parts, full_tensors
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
        tensors = self.tensors()
        if self.engine.ranks.is_main:
            take(tensors)
        for _ in tensors:  # gathered by all ranks together
            pass
        barrier()

    @property
    def trains_adapters_alone(self) -> bool:
        return adapters_of(self.model).train_alone(self.model)

    def send_parts(self, take: Callable[[Iterator[tuple[str, Any]]], None], with_base: bool) -> None:
        """As `send`, the adapters by themselves. with_base: behind the weights that they are added to."""
        stage = self.engine.settings.zero_stage
        base = full_tensors(self.model, stage, merged=False) if with_base else ()
        parts: Iterator[tuple[str, Any]] = itertools.chain(base, adapter_parts(self.model, stage))
        if self.engine.ranks.is_main:
            take(parts)
        for _ in parts:
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
        plain = self._filled_copy()
        try:
            yield plain
        finally:
            _release(plain)

    def kept(self) -> KeptModel:
        """Return the weights as they are now, in memory of their own, for rollouts that are drawn while training goes
        on. At most one of a model's is lent at a time. A collective under ZeRO-3."""
        weights = {name: tensor.detach().clone() for name, tensor in self.tensors()}
        return KeptModel(self._empty(), weights, self.updates, self.engine.ranks.is_main)

    def another_copy(self) -> PreTrainedModel:
        """Return a further copy without weights, as which kept ones may be lent beside others."""
        return _empty_copy(self.model, self.engine)

    def _filled_copy(self) -> PreTrainedModel:
        """Return a copy with the whole weights. A collective."""
        plain = self._empty()
        _fill(plain, ((name, tensor.detach().clone()) for name, tensor in self.tensors()))
        return plain

    def _empty(self) -> PreTrainedModel:
        """Return the copy, always the same, which has no weights until it is filled."""
        if self._copy is None:
            self._copy = _empty_copy(self.model, self.engine)
        return self._copy


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
        _fill(self.model, self.tensors())
        try:
            yield self.model
        finally:
            _release(self.model)


def _fill(plain: PreTrainedModel, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Put these tensors in the place of the weights of `plain`, and their numbers into its buffers."""
    targets = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for name, tensor in tensors:
        target = targets[name]
        if isinstance(target, torch.nn.Parameter):
            target.data = tensor
        else:
            target.copy_(tensor)
    plain.tie_weights()


def _empty_copy(model: PreTrainedModel, engine: TrainingEngine) -> PreTrainedModel:
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
    """Put weights without elements in the place of those on the meta device, which cannot be filled. Tied ones stay
    one."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in plain.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if weight not in made:
                empty = torch.empty(0, dtype=weight.dtype, device=device)
                made[weight] = torch.nn.Parameter(empty, requires_grad=False)
            module._parameters[name] = made[weight]


def _release(plain: PreTrainedModel) -> None:
    for parameter in plain.parameters():
        parameter.data = parameter.data.new_empty(0)
