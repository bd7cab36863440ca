"""The inner optimizer step of every trainer: micro-batches forward and backward, one step, and the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from training.utils.base.transfer import moved
from training.utils.contracts.guests import Guests, GuestSteps
from training.utils.engine.ranks.collectives import DeviceSums

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.training_engine import TrainingEngine

Batch = TypeVar("Batch")


class MicroLoss(NamedTuple):
    """loss: this micro-batch's part of the step's loss, a scalar. figures: to be summed over micro-batches and ranks.
    read: what the model returned, for its guests."""

    loss: torch.Tensor
    figures: Mapping[str, float | torch.Tensor]
    read: Any = None


@dataclass(frozen=True)
class MicroBatch:
    """One forward, and its backward.

    rows: on the device.
    loss: runs the forward.
    for_guests: what `Guests.prepare` made of the rows; () where they have nothing to do but `loss_part`.
    forward: given the rows without targets, runs the model as `loss` will; default: the engine on the rows alone.
    learns: False only reads, without a backward.
    """

    rows: TokenRows
    loss: Callable[[], MicroLoss]
    for_guests: tuple[Any, ...] = ()
    forward: Callable[[TokenRows], Any] | None = None
    learns: bool = True


@dataclass(frozen=True)
class Trainee:
    """A model in an optimizer step. group: its figures are named GROUP/... counted: what `Guests.tally` returned of the
    whole step; () if nothing was counted."""

    group: str
    engine: TrainingEngine
    micro_batches: Sequence[MicroBatch]
    guests: Guests = Guests()
    counted: tuple[Any, ...] = ()

    def begin(self) -> GuestSteps:
        """Put the model in train mode, and let the guests begin. A collective."""
        self.engine.train()
        learnt = [micro_batch for micro_batch in self.micro_batches if micro_batch.learns]

        def forward(index: int, rows: TokenRows) -> Any:
            return (learnt[index].forward or self.engine)(rows)

        return self.guests.begin([micro_batch.rows for micro_batch in learnt], forward, self.counted)

    def learn(self, micro_batch: MicroBatch, guests: GuestSteps) -> Mapping[str, float | torch.Tensor]:
        """Run a micro-batch's forward and backward; return its summands of the figures. A collective."""
        if not micro_batch.learns:
            with torch.no_grad():
                return micro_batch.loss().figures
        loss, figures, read = micro_batch.loss()
        self.engine.backward(guests.added_to(loss, micro_batch.rows, read))
        guests.after_backward(read, micro_batch.for_guests)
        return figures


class TakenStep(NamedTuple):
    """totals: the figures' sums over all ranks. figures: of the engines' steps, and of guests."""

    totals: dict[str, float]
    figures: dict[str, float]


def accumulate(trainees: Sequence[Trainee], numbers: Mapping[str, float | torch.Tensor] | None = None) -> TakenStep:
    """Take an optimizer step of every trainee. A collective; every rank has as many micro-batches.

    Micro-batches of several trainees run in turns: the first of each, then the second of each. Their figures stay on
    the device until the step is over, since reading one would wait for it; one collective sums them all.

    numbers: of this rank, summed into `totals` with the figures
    """
    sums = DeviceSums()
    begun = [(trainee, trainee.begin()) for trainee in trainees]
    for turn in range(max(len(trainee.micro_batches) for trainee in trainees)):
        for trainee, guests in begun:
            if turn < len(trainee.micro_batches):
                sums.add(trainee.learn(trainee.micro_batches[turn], guests))
    figures: dict[str, float] = {}
    for trainee, guests in begun:
        figures |= trainee.engine.step().figures(trainee.group)
        sums.add(guests.sums(trainee.group))
    sums.add(numbers or {})
    totals = sums.totals(trainees[0].engine.ranks.device, trainees[0].engine.ranks.leads)
    for trainee, guests in begun:
        figures |= guests.end(trainee.group, totals)
    return TakenStep(totals, figures)


def on_device(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """Return micro-batches, records that may have a field `for_guests`, with their tensors on `device`."""
    found = [moved(batch, device) for batch in batches]
    return [
        replace(batch, for_guests=moved(batch.for_guests, device)) if hasattr(batch, "for_guests") else batch  # type: ignore[type-var]
        for batch in found
    ]
