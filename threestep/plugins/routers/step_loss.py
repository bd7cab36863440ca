"""The balancing loss of an engine's routers, a guest of its model, exact for the whole optimizer step.

An expert's load is a share of all tokens of the step, and multiplies the gradient of each of them. So where a step has
several micro-batches, forwards without gradients count the load before the first backward; where it has one, the ranks
sum theirs after its forward. A model without routers, or whose coefficient is 0, costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.routers.routers import (
    Balance,
    RouterRecord,
    RouterSums,
    balance_of,
    balancing_loss,
    has_routers,
    largest_load,
    router_sums,
)
from training.utils.base.console import log
from training.utils.contracts.guests import Guest, GuestStep
from training.utils.engine.ranks.collectives import summed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.training_engine import TrainingEngine


@dataclass(frozen=True)
class RouterLoss(Guest):
    """The routers' loss of one model, which `engine` trains. balance: its coefficient is not 0."""

    engine: TrainingEngine
    balance: Balance
    record: RouterRecord

    why_not_ahead = (
        "the routers' balancing loss needs the load of the whole step beforehand; set --router_aux_loss_coef 0"
    )

    def begin(
        self, rows: Sequence[TokenRows], forward: Callable[[int, TokenRows], Any], counted: Any = None
    ) -> StepRouterLoss:
        """See `Guest.begin`."""
        return StepRouterLoss(self, self.load(rows, forward) if len(rows) > 1 else None)

    def sums(self, rows: TokenRows) -> RouterSums:
        """Sums of the last forward, which was that of `rows`; where ranks share these, of this rank's part."""
        own_t = self.record.part.cut_slots(rows.copies_NT().flatten())
        return router_sums(self.record.take(), own_t, self.balance.top_k)

    def load(self, rows: Sequence[TokenRows], forward: Callable[[int, TokenRows], Any]) -> RouterSums:
        """The load of all micro-batches on all ranks. Dropout draws here what it will draw in training."""
        device = self.engine.ranks.device
        parts = []
        with (
            torch.no_grad(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            self.record.without_gradients(),
        ):
            for index, part in enumerate(rows):
                forward(index, part.without_targets())
                parts.append(self.sums(part))
        return _of_all_ranks(RouterSums(*(torch.stack(several).sum(0) for several in zip(*parts, strict=True))))


class StepRouterLoss(GuestStep):
    """One optimizer step. load: of all its tokens, once it is known."""

    def __init__(self, routers: RouterLoss, load: RouterSums | None) -> None:
        self._routers, self.load = routers, load

    def loss_part(self, rows: TokenRows, read: Any = None) -> torch.Tensor:
        """Return the coefficient x the part of the loss of this micro-batch. A collective where the step has one
        micro-batch."""
        own = self._routers.sums(rows)
        if self.load is None:
            self.load = _of_all_ranks(own)
        return self._routers.balance.coefficient * balancing_loss(own.probability_E, self.load)

    def end(self, group: str, totals: Any = None) -> dict[str, float]:
        """GROUP/router_loss, before its coefficient, and GROUP/router_load_max."""
        if self.load is None:
            return {}
        loss = float(balancing_loss(self.load.probability_E, self.load))
        return {f"{group}/router_loss": loss, f"{group}/router_load_max": largest_load(self.load)}


def router_losses(
    models: Sequence[tuple[TrainingEngine, PreTrainedModel]], coefficient: float | None
) -> list[RouterLoss | None]:
    """Return the router loss of each model, inside its engine, and log what applies; None where nothing is added.

    coefficient: of those that have routers, or of all if none has. Arguments and errors otherwise: `balance_of`.
    """
    is_mixture = any(has_routers(model) for _, model in models)
    return [
        _router_loss(engine, model, coefficient if has_routers(model) or not is_mixture else None)
        for engine, model in models
    ]


def _router_loss(engine: TrainingEngine, model: PreTrainedModel, coefficient: float | None) -> RouterLoss | None:
    balance = balance_of(model, coefficient)
    if balance is None:
        return None
    log(f"{type(model).__name__}: {balance.said}", engine.ranks.is_main)
    return RouterLoss(engine, balance, RouterRecord(model)) if balance.coefficient else None


def _of_all_ranks(own: RouterSums) -> RouterSums:
    """The sums over all ranks, in one collective."""
    parts = [part.detach().double().flatten() for part in own]
    split = summed(torch.cat(parts)).split([part.numel() for part in parts])
    return RouterSums(split[0].view_as(own.chosen_LE), split[1], split[2].squeeze(0))
