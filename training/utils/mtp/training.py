"""Trains a head for multi-token prediction beside a model, as DeepSpeed's second model: nothing of the model changes.
Or with it, by one loss and one optimizer (--mtp_detach false): then the model learns from the head's loss too.

Beside it, the head reads the model's states and embeddings detached, and its output layer without gradients; it has an
optimizer and a gradient norm of its own, so that the model's weights stay those of a run without a head, to the bit.

M targets of one depth, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from training.utils.engine.ranks.collectives import summed_numbers
from training.utils.engine.whole_weights import whole_weights
from training.utils.mtp.folder import FOLDER
from training.utils.mtp.layout.entries import MtpEntries, mtp_entries, mtp_targets

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.target_head import TargetHead, TokenLogprobs, TrunkStates
    from training.utils.mtp.head import MtpHead


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
        return module.mtp_head if self.is_joint else module

    def read(self, states: TrunkStates, entries: Sequence[MtpEntries]) -> list[TokenLogprobs]:
        """Return what each depth says of its targets; inside `output_layer_whole` alone."""
        hidden = self.engine(states.hidden_LH, states.embeddings_LH, tuple(entries))
        layer = self._output_layer
        return [
            layer.read_alone(hidden_MH, entry.rows.target_ids_M)
            for hidden_MH, entry in zip(hidden, entries, strict=True)
        ]

    def output_layer_whole(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model's output layer is whole on every rank, until the backward too is over. A collective under
        ZeRO-3."""
        return whole_weights(self.policy, list(self._output_layer.parameters()))

    @property
    def _output_layer(self) -> TargetHead:
        policy: Any = self.policy.module
        layer: TargetHead | None = policy.target_head
        assert layer is not None, "a head is made for a linear output layer alone"
        return layer


@dataclass(frozen=True)
class MultiTokenPrediction:
    """What a loop asks of a head. head: None where none is trained; then nothing is laid out, run or reported."""

    head: HeadTraining | None = None

    @property
    def trains(self) -> bool:
        return self.head is not None

    @property
    def engines(self) -> dict[str, TrainingEngine]:
        """What a checkpoint holds of it, by its name there."""
        return {} if self.head is None or self.head.is_joint else {FOLDER: self.head.engine}

    @property
    def depths(self) -> int:
        return 0 if self.head is None else self.head.depths

    def asked(self, entries: Sequence[MtpEntries]) -> dict[str, Any]:
        """Return what a forward of the model gets in its keyword arguments."""
        return {"entries": tuple(entries)} if self.trains else {}

    def entries(self, rows: TokenRows) -> tuple[MtpEntries, ...]:
        """Of rows on the CPU, made with `with_before=self.trains`."""
        return mtp_entries(rows, self.depths) if self.trains else ()

    def targets(self, documents: Sequence[Document]) -> tuple[int, ...]:
        """How many targets each depth has in `documents`."""
        return tuple(mtp_targets(documents, depth) for depth in range(1, self.depths + 1))

    def of_step(self, targets: Sequence[int]) -> MtpStep:
        """Begin an optimizer step. targets: of each depth, in the whole step, on all ranks."""
        if self.head is not None:
            self.head.engine.train()
        return MtpStep(self.head, tuple(targets))

    @torch.no_grad()
    def judged(self, read: TokenLogprobs, entries: Sequence[MtpEntries], sums: MtpSums) -> None:
        """Add what each depth says of an evaluation's rows to `sums`."""
        if self.head is None:
            return
        if self.head.is_joint:
            sums.add_all(read.ahead)
            return
        assert read.states is not None
        self.head.engine.eval()
        with self.head.output_layer_whole():
            sums.add_all(self.head.read(read.states, entries))


class MtpSums:
    """Sums of a rank over the targets of each depth, by name; on the device until they are read."""

    def __init__(self) -> None:
        self.sums: dict[str, float | torch.Tensor] = {}

    def add(self, depth: int, read: TokenLogprobs) -> None:
        """Add the targets of one micro-batch."""
        self._add(f"nll_{depth}", -read.logprobs_M.detach().sum().double())
        self._add(f"right_{depth}", read.is_greedy_M.sum().double())
        self._add(f"targets_{depth}", float(read.logprobs_M.numel()))

    def add_all(self, read: Sequence[TokenLogprobs]) -> None:
        """The same of every depth, from the first."""
        for depth, own in enumerate(read, start=1):
            self.add(depth, own)

    def _add(self, name: str, value: float | torch.Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def figures(self, group: str, depths: int, device: torch.device) -> dict[str, float]:
        """Means over all ranks: GROUP/mtp_loss, nats a target, the mean of the depths; GROUP/mtp_acceptance_D, the
        share of targets that are the head's first choice at depth D. {} without a head. A collective with one."""
        if not depths:
            return {}
        names = [f"{kind}_{depth}" for kind in ("nll", "right", "targets") for depth in range(1, depths + 1)]
        totals = summed_numbers({name: self.sums.get(name, 0.0) for name in names}, device)
        of_depths = [(totals[f"targets_{depth}"], depth) for depth in range(1, depths + 1)]
        known = [(count, depth) for count, depth in of_depths if count]
        figures = {f"{group}/mtp_acceptance_{depth}": totals[f"right_{depth}"] / count for count, depth in known}
        if known:
            figures[f"{group}/mtp_loss"] = sum(totals[f"nll_{depth}"] / count for count, depth in known) / len(known)
        return figures


@dataclass
class MtpStep:
    """One optimizer step of a head; without one, nothing."""

    head: HeadTraining | None
    targets: tuple[int, ...]
    sums: MtpSums = field(default_factory=MtpSums)

    def part(self, read: TokenLogprobs) -> torch.Tensor | float:
        """Return the coefficient x this micro-batch's part of the head's loss, for the model's own backward; 0.0 unless
        both are trained by one loss."""
        if self.head is None or not self.head.is_joint:
            return 0.0
        self.sums.add_all(read.ahead)
        return self._loss(self.head, read.ahead)

    def learn(self, read: TokenLogprobs, entries: Sequence[MtpEntries]) -> None:
        """Run forward and backward of one micro-batch, after the model's own; nothing if both have one loss. read: what
        the model returned, with its `states`. A collective; every rank has as many."""
        if self.head is None or self.head.is_joint:
            return
        assert read.states is not None
        with self.head.output_layer_whole():
            own = self.head.read(read.states, entries)
            self.head.engine.backward(self._loss(self.head, own))
        self.sums.add_all(own)

    def _loss(self, head: HeadTraining, read: Sequence[TokenLogprobs]) -> torch.Tensor:
        parts = [-each.logprobs_M.sum() / max(1, count) for each, count in zip(read, self.targets, strict=True)]
        return head.loss_coef * torch.stack(parts).mean()

    def end(self, group: str) -> dict[str, float]:
        """Take the step, which the model's own engine takes if both have one; return its figures, over all ranks."""
        if self.head is None:
            return {}
        found = self.sums.figures(group, self.head.depths, self.head.engine.ranks.device)
        if self.head.is_joint:
            return found
        report = self.head.engine.step().figures("mtp")
        if "mtp/grad_norm" in report:
            found[f"{group}/mtp_grad_norm"] = report["mtp/grad_norm"]
        return {**found, f"{group}/mtp_skipped": report["mtp/skipped"]}
