"""The quantities that are judged, in the order in which data flow, each with its reference and the causes of a wrong
one."""

from __future__ import annotations

from training.audit.quantities import backward, ids, optimizer, pairs, policies, rollouts, tokens
from training.audit.quantities.quantity import Cause, Quantity

__all__ = ["QUANTITIES", "Cause", "Quantity"]

QUANTITIES: tuple[Quantity, ...] = (
    *ids.SAMPLER,
    *rollouts.QUANTITIES,
    *policies.HANDED_ON,
    *ids.IDS,
    *tokens.MASKS,
    *tokens.LOSSES,
    *backward.SCORES,
    *ids.REFERENCES,
    *pairs.QUANTITIES,
    *policies.LOSSES,
    *backward.GRADIENTS,
    *optimizer.QUANTITIES,
)
