"""Guests: features that add to a model's loss or train beside the model, which its trainer need not know.

A plugin's `Hooks.guests` returns a GuestFeature of a step's flags, which has guests or has none by these. A trainer
holds the `Guests` of each model. In an optimizer step (`engine.accumulate`) they act in the order of the tuple, and
that order is part of the result:
    `begin`, before the first forward that learns
    of each micro-batch: its forward with `forward_kwargs`, the backward of its loss + `loss_part`, `after_backward`
    the engine's step; then `end`, with the guest's `sums` over all ranks

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from training.utils.base.errors import Mistakes
    from training.utils.contracts.documents import Document

# Lays rows of a dataset out as this rank's micro-batches of an evaluation, on the device; as many on every rank.
LayOut = Callable[[Sequence[Any]], Iterable[Any]]


class LentHead(Protocol):
    """A head that guesses tokens, with whole weights while it is lent.

    depths: its modules, of which the first guesses: `trunk` runs over entries, which `joined` makes of the embedding of
        a token and the model's state before it.
    """

    depths: Any

    def state_dict(self) -> dict[str, Any]: ...


# Lends such a head; every rank must enter together.
BorrowHead = Callable[[], AbstractContextManager[LentHead]]


class OtherWeights(Protocol):
    """Further values of a model's weights, such as their average: checkpoints keep them, and they end as a model.

    name: of each rank's file in a checkpoint. folder: of the finished model. shares: this rank's, for the file
    """

    name: str
    folder: str
    shares: list[torch.Tensor]

    def load_state(self, shares: list[torch.Tensor]) -> None:
        """Restore the shares of this rank, of as many ranks."""

    def load_whole(self, parts: list[list[torch.Tensor]]) -> None:
        """Restore the shares of all ranks, in their order, of any number of ranks."""

    def put_in_place(self) -> None:
        """Overwrite the model's weights, at the end of training. A collective."""


class GuestStep:
    """One optimizer step of a guest; this one does nothing."""

    @property
    def sums(self) -> Mapping[str, float | torch.Tensor]:
        """This rank's sums for `end`, the same names on every rank; on the device."""
        return {}

    def loss_part(self, rows: Any, read: Any) -> torch.Tensor | float:
        """Return what the guest adds to the loss of a micro-batch whose forward has just run. A collective.
        rows: its TokenRows. read: what the model returned."""
        return 0.0

    def after_backward(self, read: Any, prepared: Any) -> None:
        """Act after the backward of a micro-batch. prepared: of `Guest.prepare`; None where it was not called. A
        collective."""

    def end(self, group: str, totals: Mapping[str, float]) -> dict[str, float]:
        """Take the guest's step; return its figures, named GROUP/... totals: `sums` over all ranks. A collective."""
        return {}


class Guest:
    """This one does nothing; each feature overrides what it needs.

    needs_before: rows are laid out with `TokenRows.before_NT`.
    why_not_ahead: why the guest cannot learn from a forward that ran before the step began; empty if it can.
    own_loss_weight: by which step 1 multiplies its own loss.
    adds_to_loss: steps have a loss that is not the trainer's alone.
    """

    needs_before = False
    why_not_ahead = ""
    own_loss_weight = 1.0
    adds_to_loss = True

    @property
    def engines(self) -> Mapping[str, Any]:
        """Training engines of the guest's own, by the names that checkpoints have for them."""
        return {}

    @property
    def other_weights(self) -> OtherWeights | None:
        """Further weights of the model, if the guest keeps some."""
        return None

    def open_rows(self, splits: Sequence[Sequence[Any]], lay_out: LayOut) -> None:
        """Look at the rows of a run, before the first of them is evaluated or trained on. Not called for rollouts. A
        collective."""

    def prepare(self, rows: Any) -> Any:
        """Return what the guest reads of a micro-batch's TokenRows, on the CPU: tensors in records and tuples. Pure."""
        return None

    def tally(self, documents: Sequence[Document]) -> Any:
        """Return what the guest has to know of a whole optimizer step, given the documents of all ranks. Pure."""
        return None

    def forward_kwargs(self, prepared: Any) -> Mapping[str, Any]:
        """Return keyword arguments for the model's forward of a micro-batch."""
        return {}

    def begin(self, rows: Sequence[Any], forward: Callable[[int, Any], Any], counted: Any) -> GuestStep:
        """Begin an optimizer step, in train mode. A collective; every rank has as many micro-batches.

        rows: TokenRows of the micro-batches that learn. forward: given an index of these and its rows without targets,
        runs the model on them as training will. counted: of `tally`.
        """
        return GuestStep()

    def evaluate(self, read: Any, prepared: Any) -> Mapping[str, float | torch.Tensor]:
        """Return summands of the figures of an evaluation: of one micro-batch, the same names for each."""
        return {}

    def evaluated(self, group: str, totals: Mapping[str, float]) -> dict[str, float]:
        """Return an evaluation's figures, named GROUP/... totals: the summands' sums over all ranks."""
        return {}

    def model_writer(self) -> Callable[[Path], None] | None:
        """Return what writes the guest into a model folder on rank 0; None if it leaves nothing. A collective."""
        return None

    def lent_guesser(self, model: Any, seed: int) -> BorrowHead | None:
        """Return what lends rollouts of `model` a head to guess tokens by (`LentHead`); None without one."""
        return None


class GuestSteps(tuple[GuestStep, ...]):
    """An optimizer step of one model's guests."""

    __slots__ = ()

    def added_to(self, loss: torch.Tensor, rows: Any, read: Any) -> torch.Tensor:
        """Return the loss of a micro-batch with the guests' parts. A collective."""
        for guest in self:
            loss = loss + guest.loss_part(rows, read)
        return loss

    def after_backward(self, read: Any, prepared: Sequence[Any]) -> None:
        """prepared: of `Guests.prepare`; () where it was not called. A collective."""
        for guest, own in zip(self, prepared or (None,) * len(self), strict=True):
            guest.after_backward(read, own)

    def sums(self, group: str) -> dict[str, float | torch.Tensor]:
        """Return this rank's sums for `end`, by names that no figure of the model has."""
        return {f"{group} {name}": number for guest in self for name, number in guest.sums.items()}

    def end(self, group: str, totals: dict[str, float]) -> dict[str, float]:
        """Take the guests' steps; return their figures, named GROUP/... totals: sums over all ranks, from which those
        of the guests are removed. A collective."""
        figures: dict[str, float] = {}
        for guest in self:
            figures |= guest.end(group, {name: totals.pop(f"{group} {name}") for name in guest.sums})
        return figures


class Guests(tuple[Guest, ...]):
    """The guests of one model."""

    __slots__ = ()

    @property
    def needs_before(self) -> bool:
        return any(guest.needs_before for guest in self)

    @property
    def own_loss_weight(self) -> float:
        return math.prod(guest.own_loss_weight for guest in self)

    @property
    def other_weights(self) -> list[OtherWeights]:
        return [weights for guest in self if (weights := guest.other_weights) is not None]

    @property
    def engines(self) -> dict[str, Any]:
        return {name: engine for guest in self for name, engine in guest.engines.items()}

    def open_rows(self, splits: Sequence[Sequence[Any]], lay_out: LayOut) -> None:
        for guest in self:
            guest.open_rows(splits, lay_out)

    def prepare(self, rows: Any) -> tuple[Any, ...]:
        return tuple(guest.prepare(rows) for guest in self)

    def tally(self, documents: Sequence[Document]) -> tuple[Any, ...]:
        return tuple(guest.tally(documents) for guest in self)

    def begin(self, rows: Sequence[Any], forward: Callable[[int, Any], Any], counted: Sequence[Any] = ()) -> GuestSteps:
        """Begin an optimizer step. counted: of `tally`; () where it was not called. A collective."""
        each = zip(self, counted or (None,) * len(self), strict=True)
        return GuestSteps(guest.begin(rows, forward, own) for guest, own in each)

    def forward_kwargs(self, prepared: Sequence[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for guest, own in zip(self, prepared, strict=True):
            found |= guest.forward_kwargs(own)
        return found

    def evaluate(self, read: Any, prepared: Sequence[Any]) -> dict[str, float | torch.Tensor]:
        found: dict[str, float | torch.Tensor] = {}
        for guest, own in zip(self, prepared, strict=True):
            found |= guest.evaluate(read, own)
        return found

    def evaluated(self, group: str, totals: Mapping[str, float]) -> dict[str, float]:
        return {name: value for guest in self for name, value in guest.evaluated(group, totals).items()}

    def model_writer(self) -> Callable[[Path], None] | None:
        """A collective."""
        writers = [write for guest in self if (write := guest.model_writer()) is not None]
        if not writers:
            return None

        def write_all(folder: Path) -> None:
            for write in writers:
                write(folder)

        return write_all

    def lent_guesser(self, model: Any, seed: int) -> BorrowHead | None:
        return next((lent for guest in self if (lent := guest.lent_guesser(model, seed)) is not None), None)


class TokenLog(Protocol):
    """Notes of the tokens of one rollout, while they are drawn."""

    def note_prompt_tokens(self) -> None:
        """The last forward was of the next tokens of all prompts."""

    def note_tokens(self, rows_A: torch.Tensor, place: int) -> None:
        """The last forward was that of one response token of each of these rows, at `place` of the response."""

    def added_to(self, rollout: Any) -> Any:
        """Return the `Rollout` with what was noted."""


class ExpertRecord(Protocol):
    """The choices of the experts of one model, in its forwards."""

    def way(self, way: Any, name: str) -> Any:
        """Return how the model `name`, which is decoded in a `DecodeWay`, is while it is recorded. ThreestepError where
        it cannot be."""

    def logged(self, model: Any, request: Any) -> AbstractContextManager[TokenLog]:
        """Inside, each forward of `model`, the trained one or a copy of it, is recorded. Yield the log of a rollout.
        request: its `RolloutRequest`."""

    def differing(self) -> torch.Tensor | None:
        """Return bool [T], of the last forward of rows with given experts: True where the model's own experts are
        others in some layer; None where there was no such forward since the last call."""


class GuestFeature:
    """This one has no guests; each overrides what it needs. The first model is the one to train, in step 3 the actor.

    place: guests act in the order of their features' places, which is part of a run's results; those of one place in
        the order of the plugins' names. Of this project: the balancing loss of routers 100, the head for multi-token
        prediction 200, the teacher 300, the moving average 400.
    needs_segments: the flag for which the first model must take a mask of segments; None without one.
    trains_alone: its loss trains the first model without the trainer's own.
    lends_guesser: a guest of the first model lends rollouts a head (`Guest.lent_guesser`).
    records_experts: rollouts of the first model have `experts`.
    """

    place = 1000
    needs_segments: str | None = None
    trains_alone = False
    lends_guesser = False
    records_experts = False

    def exact_weights(self) -> Mapping[str, str]:
        """Return the flags that are set and need the first model's weights as they are stored, and why."""
        return {}

    def reuse_obstacle(self) -> tuple[str, str] | None:
        """Return why forwards of the first model that read cannot be learned from, a sentence after a flag's name, and
        what to do; None if they can. What is known once models are loaded says `Guest.why_not_ahead`."""
        return None

    def check_words(self, tokenizer: Any) -> None:
        """ThreestepError if another model would read other words than this tokenizer writes; before models load."""

    def check_media(self, mistakes: Mistakes) -> None:
        """Note what does not go with rows, in step 3 prompts, that have media."""

    def inside(self, path: str, model: Any, zero_stage: int, seed: int, *, ranks: Any) -> Mapping[str, nn.Module]:
        """Return the modules that train with `model`, the first, by one loss, for its PolicyModel. A collective, before
        the model is under DeepSpeed. path: of the model. ranks: a `Ranks`."""
        return {}

    def open(self, models: Sequence[tuple[Any, Any]], path: str, total_steps: int, seed: int) -> Sequence[Guest | None]:
        """Return the guest of each model, from the first on; None for one without. A collective.

        models: (TrainingEngine, transformers model). path: of the first. total_steps: of its optimizer.

        Raises ThreestepError for a guest that a model cannot have.
        """
        return ()

    def reads_twice(self, model: Any) -> bool:
        """True if a step of several forwards first reads each of them once more. model: the first, perhaps on meta."""
        return False

    def recorded_experts(self, model: Any, read: Callable[[Any], torch.Tensor], ranks: Any) -> ExpertRecord | None:
        """Return the record of the experts of the first model; None without one. A collective. read: the numbers of
        TokenRows, in eval mode."""
        return None

    def planned(
        self, model: Any, settings: Any, ranks: int, device: Any
    ) -> tuple[Sequence[str], Sequence[Any], Sequence[Any]]:
        """Return sentences on what trains beside `model` (the first, on the meta device), what that holds of one rank
        besides its activations (MemoryLine), and its moments (Moment).

        settings: the EngineSettings of the model. device: a PlannedDevice (`base.machine`).
        """
        return (), (), ()
