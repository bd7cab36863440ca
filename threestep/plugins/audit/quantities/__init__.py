"""The quantities that are judged, in the order in which data flow, each with its reference and the causes of a wrong
one."""

from __future__ import annotations

from dataclasses import replace

from threestep.plugins.audit.quantities import backward, critic, ids, optimizer, pairs, policies, rollouts, tokens
from threestep.plugins.audit.quantities.quantity import Cause, Quantity

__all__ = ["QUANTITIES", "Cause", "Quantity"]


def _at_the_backward_pass(loss: Quantity) -> Quantity:
    """The loss that the backward pass received, for records that have it or the whole loss."""
    name = "backward_loss"
    return replace(loss, name=name, applies=lambda step: name in step.head.figures or loss.applies(step))


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
    *(_at_the_backward_pass(each) for each in _LOSSES if each.name == "loss"),
    *backward.GRADIENTS,
    *optimizer.QUANTITIES,
    *critic.QUANTITIES,
)
