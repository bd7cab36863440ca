"""The quantities that are judged, in the order in which data flow, each with its reference and the causes of a wrong
one."""

from __future__ import annotations

from dataclasses import replace

from threestep.plugins.audit.quantities import backward, critic, ids, optimizer, pairs, policies, rollouts, tokens
from threestep.plugins.audit.quantities.quantity import Cause, Quantity

__all__ = ["QUANTITIES", "Cause", "Quantity"]

_LOSSES = (*tokens.LOSSES, *pairs.QUANTITIES, *policies.LOSSES)
QUANTITIES: tuple[Quantity, ...] = (
    *ids.SAMPLER,
    *rollouts.QUANTITIES,
    *policies.HANDED_ON,
    *ids.IDS,
    *tokens.MASKS,
    *backward.LOGITS,
    *tokens.LOSSES,
    *backward.SCORES,
    *ids.REFERENCES,
    *pairs.QUANTITIES,
    *critic.VALUES,
    *policies.LOSSES,
    *(replace(each, name="backward_loss") for each in _LOSSES if each.name == "loss"),
    *backward.GRADIENTS,
    *optimizer.QUANTITIES,
    *critic.QUANTITIES,
)
