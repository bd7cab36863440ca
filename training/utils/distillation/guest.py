"""Distillation as a guest of the model in training: its loss beside the trainer's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.contracts.guests import Guest, GuestStep
from training.utils.engine.ranks.collectives import DeviceSums

if TYPE_CHECKING:
    import torch

    from training.utils.contracts.documents import Document
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.target_head import AtHead, TokenLogprobs


@dataclass(frozen=True)
class Distillation(Guest):
    """compare: see `PolicyModel.forward`; what it makes of the head is a `head_loss.ComparedTokens`. coefficient: of
    the mean divergence over the tokens of an optimizer step, on all ranks. covers_all: each token is compared."""

    compare: Callable[[TokenRows, float], AtHead]
    coefficient: float
    covers_all: bool

    why_not_ahead = "the teacher is read with the forward that learns; leave --teacher_model_name_or_path out"

    def tally(self, documents: Sequence[Document]) -> int:
        """Return the tokens to be predicted."""
        return sum(document.targets for document in documents)

    def forward_kwargs(self, prepared: Any) -> Mapping[str, Any]:
        """See `Guest.forward_kwargs`."""
        return {"compare": self.compare}

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
