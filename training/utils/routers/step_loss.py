"""The balancing loss of an engine's routers, exact for the whole optimizer step.

An expert's load is a share of all tokens of the step, and multiplies the gradient of each of them. So where a step has
several micro-batches, forwards without gradients count the load before the first backward; where it has one, the ranks
sum theirs after its forward. A model without routers, or whose coefficient is 0, costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from training.utils.base.console import log
from training.utils.engine.ranks.collectives import summed
from training.utils.routers.routers import (
    Balance,
    RouterRecord,
    RouterSums,
    balance_of,
    balancing_loss,
    largest_load,
    router_sums,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.training_engine import TrainingEngine


class Routed(NamedTuple):
    """A model whose routers are balanced. balance: its coefficient is not 0."""

    engine: TrainingEngine
    balance: Balance
    record: RouterRecord

    def sums(self, rows: TokenRows) -> RouterSums:
        """Of the forward of `rows` that has just run."""
        return router_sums(self.record.take(), rows.copies_NT().flatten(), self.balance.top_k)

    def counted(self, rows: Sequence[TokenRows], forward: Callable[[int, TokenRows], Any]) -> RouterSums:
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


@dataclass(frozen=True)
class RouterLoss:
    """Of one model. routed: None adds no loss."""

    routed: Routed | None = None

    def of_step(
        self, rows: Sequence[TokenRows], forward: Callable[[int, TokenRows], Any] | None = None
    ) -> StepRouterLoss:
        """Begin an optimizer step on these micro-batches, in train mode. A collective; every rank has as many.

        forward: given a micro-batch's index and its rows without targets, runs the engine on them as training will;
            default: the engine on the rows alone.
        """
        step = StepRouterLoss(self.routed)
        if self.routed is not None and len(rows) > 1:
            engine = self.routed.engine
            step.load = self.routed.counted(rows, forward or (lambda index, part: engine(part)))
        return step


class StepRouterLoss:
    """One optimizer step. load: of all its tokens, once it is known."""

    def __init__(self, routed: Routed | None) -> None:
        self._routed = routed
        self.load: RouterSums | None = None

    def part(self, rows: TokenRows) -> torch.Tensor | float:
        """Return the coefficient x the part of the loss of this micro-batch, whose forward has just run; 0.0 without
        routers. A collective where the step has one micro-batch."""
        if self._routed is None:
            return 0.0
        own = self._routed.sums(rows)
        if self.load is None:
            self.load = _of_all_ranks(own)
        return self._routed.balance.coefficient * balancing_loss(own.probability_E, self.load)

    def figures(self, group: str) -> dict[str, float]:
        """GROUP/router_loss, before its coefficient, and GROUP/router_load_max; nothing without routers."""
        if self.load is None:
            return {}
        loss = float(balancing_loss(self.load.probability_E, self.load))
        return {f"{group}/router_loss": loss, f"{group}/router_load_max": largest_load(self.load)}


def router_loss(engine: TrainingEngine, model: PreTrainedModel, coefficient: float | None) -> RouterLoss:
    """Return the router loss of `model`, inside `engine`, and log what applies. Arguments and errors: `balance_of`."""
    balance = balance_of(model, coefficient)
    if balance is None:
        return RouterLoss()
    log(f"{type(model).__name__}: {balance.said}", engine.ranks.is_main)
    return RouterLoss(Routed(engine, balance, RouterRecord(model)) if balance.coefficient else None)


def _of_all_ranks(own: RouterSums) -> RouterSums:
    """The sums over all ranks, in one collective."""
    parts = [part.detach().double().flatten() for part in own]
    split = summed(torch.cat(parts)).split([part.numel() for part in parts])
    return RouterSums(split[0].view_as(own.chosen_LE), split[1], split[2].squeeze(0))
