"""Trains a head for multi-token prediction beside a model, as DeepSpeed's second model: nothing of the model changes.
Or with it, by one loss and one optimizer (--mtp_detach false): then the model learns from the head's loss too.

Beside it, the head reads the model's states and embeddings detached, and its output layer without gradients; it has an
optimizer and a gradient norm of its own, so that the model's weights stay those of a run without a head, to the bit.

M targets of one depth, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from threestep.plugins.mtp.folder import FOLDER, save_head
from threestep.plugins.mtp.head import new_head
from threestep.plugins.mtp.layout.entries import mtp_entries, mtp_targets
from threestep.plugins.mtp.reading import INSIDE, read_ahead, read_depths, read_states
from training.utils.contracts.guests import Guest, GuestStep
from training.utils.engine.ranks.collectives import DeviceSums
from training.utils.engine.zero3 import whole_weights

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from threestep.plugins.mtp.head import MtpHead
    from threestep.plugins.mtp.layout.entries import MtpEntries
    from threestep.plugins.mtp.reading import TrunkStates
    from training.utils.contracts.documents import Document
    from training.utils.contracts.guests import BorrowHead
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.token_model import TargetHead, TokenLogprobs


@dataclass(frozen=True)
class HeadTraining:
    """engine: trains an MtpHead. policy: the engine of the model beside it, a PolicyModel; the same engine if both are
    trained by one loss."""

    engine: TrainingEngine
    policy: TrainingEngine
    loss_coef: float
    depths: int

    @property
    def is_joint(self) -> bool:
        return self.engine is self.policy

    @property
    def module(self) -> MtpHead:
        """The head, which may be sharded."""
        module: Any = self.engine.module
        return module.get_submodule(INSIDE) if self.is_joint else module

    def read(self, states: TrunkStates, entries: Sequence[MtpEntries]) -> list[TokenLogprobs]:
        """Return what each depth says of its targets; inside `output_layer_whole` alone."""
        hidden = self.engine(states.hidden_LH, states.embeddings_LH, tuple(entries), states.part)
        return read_depths(hidden, entries, states.part, self._output_layer.read_alone)

    def output_layer_whole(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model's output layer is whole on every rank, until the backward too is over. A collective under
        ZeRO-3."""
        return whole_weights(self.policy.engine, list(self._output_layer.parameters()), self.policy.settings.zero_stage)

    @property
    def _output_layer(self) -> TargetHead:
        policy: Any = self.policy.module
        layer: TargetHead | None = policy.target_head
        assert layer is not None, "a head is made for a linear output layer alone"
        return layer


@dataclass(frozen=True)
class MultiTokenPrediction(Guest):
    """The guest of a model that has a head in training."""

    head: HeadTraining

    needs_before = True

    @property
    def engines(self) -> dict[str, TrainingEngine]:
        """See `Guest.engines`."""
        return {} if self.head.is_joint else {FOLDER: self.head.engine}

    def prepare(self, rows: TokenRows) -> tuple[MtpEntries, ...]:
        """Return the entries of each depth."""
        return mtp_entries(rows, self.head.depths)

    def tally(self, documents: Sequence[Document]) -> tuple[int, ...]:
        """Return how many targets each depth has in `documents`."""
        return tuple(mtp_targets(documents, depth) for depth in range(1, self.head.depths + 1))

    def forward_kwargs(self, prepared: Sequence[MtpEntries]) -> dict[str, Any]:
        """See `Guest.forward_kwargs`."""
        return {"after_trunk": partial(read_ahead, entries=prepared) if self.head.is_joint else read_states}

    def begin(self, rows: Any, forward: Any, counted: tuple[int, ...]) -> MtpStep:
        """See `Guest.begin`. counted: targets of each depth, in the whole step, on all ranks."""
        self.head.engine.train()
        return MtpStep(self.head, counted)

    @torch.no_grad()
    def evaluate(self, read: TokenLogprobs, prepared: Sequence[MtpEntries]) -> dict[str, float | torch.Tensor]:
        """See `Guest.evaluate`."""
        if self.head.is_joint:
            return _summands(read.beside)
        self.head.engine.eval()
        with self.head.output_layer_whole():
            return _summands(self.head.read(read.beside, prepared))

    def evaluated(self, group: str, totals: Mapping[str, float]) -> dict[str, float]:
        """See `Guest.evaluated`."""
        return _figures(group, self.head.depths, totals)

    def model_writer(self) -> Callable[[Path], None]:
        """See `Guest.model_writer`."""
        tensors = self.head.engine.full_state(self.head.module)
        return lambda folder: save_head(folder, self.head.depths, tensors)

    def lent_guesser(self, model: PreTrainedModel, seed: int) -> BorrowHead:
        """See `Guest.lent_guesser`."""
        return WholeHead(self.head.engine, partial(new_head, model, self.head.depths, seed)).lent


def _summands(read: Sequence[TokenLogprobs]) -> dict[str, float | torch.Tensor]:
    """Sums over a micro-batch, by name. read: log-probabilities of each depth."""
    found: dict[str, float | torch.Tensor] = {}
    for depth, own in enumerate(read, start=1):
        found[f"nll_{depth}"] = -own.logprobs_M.detach().sum()
        found[f"right_{depth}"] = own.is_greedy_M.sum()
        found[f"targets_{depth}"] = float(own.logprobs_M.numel())
    return found


def _figures(group: str, depths: int, totals: Mapping[str, float]) -> dict[str, float]:
    """Means over all ranks: GROUP/mtp_loss, nats a target, the mean of the depths; GROUP/mtp_acceptance_D, the share of
    targets that are the head's first choice at depth D. totals: of `_summands`."""
    of_depths = [(totals[f"targets_{depth}"], depth) for depth in range(1, depths + 1)]
    known = [(count, depth) for count, depth in of_depths if count]
    figures = {f"{group}/mtp_acceptance_{depth}": totals[f"right_{depth}"] / count for count, depth in known}
    if known:
        figures[f"{group}/mtp_loss"] = sum(totals[f"nll_{depth}"] / count for count, depth in known) / len(known)
    return figures


class MtpStep(GuestStep):
    """One optimizer step of a head. targets: of each depth, in the whole step, on all ranks."""

    def __init__(self, head: HeadTraining, targets: tuple[int, ...]) -> None:
        self._head, self._targets, self._sums = head, targets, DeviceSums()

    @property
    def sums(self) -> Mapping[str, float | torch.Tensor]:
        """See `GuestStep.sums`."""
        return self._sums.sums

    def loss_part(self, rows: TokenRows, read: TokenLogprobs) -> torch.Tensor | float:
        """Return the coefficient x this micro-batch's part of the head's loss; 0.0 unless both are trained by one
        loss."""
        if not self._head.is_joint:
            return 0.0
        self._sums.add(_summands(read.beside))
        return self._loss(read.beside)

    def after_backward(self, read: TokenLogprobs, prepared: Sequence[MtpEntries] | None) -> None:
        """Run forward and backward of a head beside the model. read: what the model returned, with its states."""
        if prepared is None or self._head.is_joint:
            return
        with self._head.output_layer_whole():
            own = self._head.read(read.beside, prepared)
            self._head.engine.backward(self._loss(own))
        self._sums.add(_summands(own))

    def _loss(self, read: Sequence[TokenLogprobs]) -> torch.Tensor:
        parts = [-each.logprobs_M.sum() / max(1, count) for each, count in zip(read, self._targets, strict=True)]
        return self._head.loss_coef * torch.stack(parts).mean()

    def end(self, group: str, totals: Mapping[str, float]) -> dict[str, float]:
        """Take the step, which the model's own engine has taken if both have one; return its figures."""
        found = _figures(group, self._head.depths, totals)
        if self._head.is_joint:
            return found
        report = self._head.engine.step().figures("mtp")
        if "mtp/grad_norm" in report:
            found[f"{group}/mtp_grad_norm"] = report["mtp/grad_norm"]
        return {**found, f"{group}/mtp_skipped": report["mtp/skipped"]}


class WholeHead:
    """Lends the head that `engine` trains to rollouts, in eval mode with whole weights on one rank.

    Below ZeRO-3 that is the trained module itself. Under ZeRO-3 it is a copy on every rank, filled by gathering the
    weights each time: a head is one block.
    """

    def __init__(self, engine: TrainingEngine, make_empty: Callable[[], MtpHead]) -> None:
        """make_empty: makes a head of the same kind, with whole weights of any value."""
        self._engine, self._make_empty = engine, make_empty
        self._copy: MtpHead | None = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[MtpHead]:
        """A collective under ZeRO-3: all ranks enter together."""
        engine = self._engine
        head = cast("MtpHead", engine.module)
        if engine.settings.zero_stage == 3:
            if self._copy is None:
                self._copy = self._make_empty().to(engine.ranks.device).requires_grad_(False)
            targets = dict(self._copy.named_parameters()) | dict(self._copy.named_buffers())
            for name, tensor in engine.full_tensors(head):
                if name in targets:
                    targets[name].copy_(tensor)
            head = self._copy
        was_training = head.training
        head.eval()
        try:
            yield head
        finally:
            head.train(was_training)
