"""The quantities that are judged, in the order in which data flow, each with its reference and the causes of a wrong
one."""

from __future__ import annotations

from training.audit.quantities import gradients, optimizer, pairs, policies, rollouts, tokens
from training.audit.quantities.quantity import Cause, Quantity

__all__ = ["QUANTITIES", "Cause", "Quantity"]

QUANTITIES: tuple[Quantity, ...] = (
    *rollouts.QUANTITIES,
    *policies.HANDED_ON,
    *tokens.MASKS,
    *tokens.LOSSES,
    *gradients.SCORES,
    *pairs.QUANTITIES,
    *policies.LOSSES,
    *gradients.GRADIENTS,
    *optimizer.QUANTITIES,
)
