"""Distillation as a guest of the model in training: its loss beside the trainer's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from threestep.plugins.distillation.top_tokens import TopTokens, compare_top
from training.utils.contracts.guests import Guest, GuestStep
from training.utils.engine.ranks.collectives import DeviceSums

if TYPE_CHECKING:
    import torch

    from threestep.plugins.distillation.settings import DivergenceSettings
    from training.utils.contracts.documents import Document
    from training.utils.contracts.guests import LayOut
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.token_model import AtHead, TokenLogprobs


@dataclass(frozen=True)
class Distillation(Guest):
    """coefficient: of the mean divergence over the tokens of an optimizer step, on all ranks. covers_all: each token is
    compared. A subclass gives the model's forward a `compare` (`PolicyModel.forward`), which makes a
    `head_loss.HeadComparison` of the head."""

    coefficient: float
    covers_all: bool
    own_loss_weight: float = field(default=1.0, kw_only=True)

    why_not_ahead = "the teacher is read in the training forward pass; remove the teacher"

    def tally(self, documents: Sequence[Document]) -> int:
        """Return the tokens to be predicted."""
        return sum(document.targets for document in documents)

    def begin(self, rows: Any, forward: Any, counted: int) -> DistillationStep:
        """See `Guest.begin`."""
        return DistillationStep(self, counted)

    def evaluate(self, read: TokenLogprobs, prepared: Any) -> dict[str, float | torch.Tensor]:
        """See `Guest.evaluate`."""
        return summands(read)

    def evaluated(self, group: str, totals: Mapping[str, float]) -> dict[str, float]:
        """Return GROUP/teacher_divergence, nats a token, and GROUP/teacher_mass, the teacher's probability of its k
        likeliest tokens, if they are compared."""
        tokens = totals["teacher_tokens"]
        if not tokens:
            return {}
        covered = {} if self.covers_all else {f"{group}/teacher_mass": totals["teacher_mass"] / tokens}
        return {f"{group}/teacher_divergence": totals["teacher_divergence"] / tokens, **covered}


@dataclass(frozen=True)
class LiveDistillation(Distillation):
    """compare: of a teacher in this process."""

    compare: Callable[[TokenRows, float], AtHead]

    def forward_kwargs(self, prepared: Any) -> Mapping[str, Any]:
        """See `Guest.forward_kwargs`."""
        return {"compare": self.compare}


@dataclass(frozen=True)
class StoredDistillation(Distillation):
    """The teacher's likeliest tokens are known before a forward.

    top_tokens: those after each different target's beginning, of a micro-batch on the CPU; None while they are written.
    opened: is called with the rows of the run, before they train; None where they are not known, as rollouts are.
    """

    top_tokens: Callable[[TokenRows], TopTokens | None]
    settings: DivergenceSettings
    opened: Callable[[Sequence[Sequence[Any]], LayOut], None] | None = field(default=None)

    needs_before = True

    def open_rows(self, splits: Sequence[Sequence[Any]], lay_out: LayOut) -> None:
        """See `Guest.open_rows`."""
        if self.opened is not None:
            self.opened(splits, lay_out)

    def prepare(self, rows: TokenRows) -> TopTokens | None:
        """See `Guest.prepare`."""
        return self.top_tokens(rows)

    def forward_kwargs(self, prepared: TopTokens) -> Mapping[str, Any]:
        """See `Guest.forward_kwargs`."""
        return {"compare": partial(compare_top, prepared, self.settings)}


def summands(read: TokenLogprobs) -> dict[str, float | torch.Tensor]:
    """Sums over a micro-batch, by name."""
    total, covered = read.compared
    tokens = float(read.logprobs_M.numel())
    return {"teacher_divergence": total.detach(), "teacher_mass": covered, "teacher_tokens": tokens}


class DistillationStep(GuestStep):
    """One optimizer step. tokens: to be predicted, of all ranks."""

    def __init__(self, guest: Distillation, tokens: int) -> None:
        self._guest, self._tokens, self._sums = guest, tokens, DeviceSums()

    @property
    def sums(self) -> Mapping[str, float | torch.Tensor]:
        """See `GuestStep.sums`."""
        return self._sums.sums

    def loss_part(self, rows: TokenRows, read: TokenLogprobs | None) -> torch.Tensor | float:
        """Return the coefficient x this micro-batch's part of the mean divergence. read: None of texts that no teacher
        reads."""
        if read is None:
            return 0.0
        self._sums.add(summands(read))
        return self._guest.coefficient * read.compared.total / self._tokens

    def end(self, group: str, totals: Mapping[str, float]) -> dict[str, float]:
        """See `Guest.evaluated`."""
        return self._guest.evaluated(group, totals) if totals else {}
