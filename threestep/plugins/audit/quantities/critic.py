"""The critic's values, gradient and update, judged as the actor's are. T tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from threestep.plugins.audit.quantities import backward, optimizer
from threestep.plugins.audit.quantities.models import is_rounded, model_values
from threestep.plugins.audit.quantities.policies import value_losses
from threestep.plugins.audit.quantities.quantity import Cause, Quantity
from threestep.plugins.audit.recording.schema import CRITIC
from threestep.plugins.audit.references import reductions

if TYPE_CHECKING:
    from collections.abc import Callable

    from threestep.plugins.audit.quantities.quantity import Numbers
    from threestep.plugins.audit.quantities.step import AuditedStep
    from threestep.plugins.audit.references.llama import Slopes


def _values(step: AuditedStep) -> np.ndarray:
    return model_values(step.critic())


def _at_its_own_place(step: AuditedStep) -> np.ndarray:
    """Each value read at the token, not at the place before it; NaN at the last token of a sequence."""
    same_T = (np.roll(step.sequence_T, -1) == step.sequence_T) & np.roll(step.real_T, -1)
    return np.where(same_T, np.roll(_values(step), -1), np.nan)


_NEW_VALUES = Quantity(
    "new_values",
    ("policy",),
    _values,
    (
        Cause("each value is read at the token itself, not at the place before it", _at_its_own_place),
        Cause("the sign is wrong", lambda step: -_values(step)),
    ),
    lambda step, right: (0.1 if is_rounded(step.critic()) else 2e-5) * (1.0 + np.abs(right)),
    lambda step: step.tensor("loss_mask"),
    axis="T",
    applies=lambda step: step.has_critic,
)


def _slopes(step: AuditedStep, reduce: reductions.Reduction | None) -> Slopes:
    """By each value. A token's loss follows from its own value alone."""
    from threestep.plugins.audit.references.llama import Slopes

    own = reductions.token_mean if reduce is None else reduce
    weights_T = backward.slopes_of_units(step.token_units(np.zeros(len(step.place_T))), own)

    def losses(values_T: np.ndarray) -> np.ndarray:
        return value_losses(step.replaced(new_values=values_T))

    return Slopes(values_T=weights_T * backward.central(losses, step.tensor("new_values")))


backward.SLOPES |= {"critic": _slopes}


def _of_critic(quantity: Quantity) -> Quantity:
    """The same quantity of the critic."""

    def moved(compute: Callable[[AuditedStep], Numbers]) -> Callable[[AuditedStep], Numbers]:
        return lambda step: compute(step.critic())

    recorded = quantity.recorded or partial(_figure, name=quantity.name)
    return replace(
        quantity,
        name=f"{CRITIC}{quantity.name}",
        objectives=("policy",),
        compute=moved(quantity.compute),
        causes=tuple(Cause(cause.sentence, moved(cause.compute)) for cause in quantity.causes),
        tolerance=lambda step, right: quantity.tolerance(step.critic(), right),
        recorded=moved(recorded),
        axis="CW" if quantity.axis else "",
        applies=lambda step: step.has_critic,
    )


def _figure(step: AuditedStep, name: str) -> float:
    return step.figure(name)


VALUES = (_NEW_VALUES,)
QUANTITIES = tuple(_of_critic(each) for each in (*backward.GRADIENTS, *optimizer.QUANTITIES))
