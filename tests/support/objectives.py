"""Objectives of direct preference optimisation, by the names of their losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from training.step2_dpo.loss import LOSSES, Objective


def objective(loss_type: str, beta: float, *, weight: float = 1.0, ld_alpha: float = 1.0, **own: Any) -> Objective:
    """Return the objective that `--loss_type` names. own: values of the loss's own flags; the others have defaults."""
    loss = LOSSES[loss_type]
    return Objective(loss, beta, (loss.flags or SimpleNamespace)(**own), weight, ld_alpha, loss_type)


def objectives(
    loss_type: str, beta: float, sft_coef: float = 0.0, *, ld_alpha: float = 1.0, **own: Any
) -> tuple[Objective, ...]:
    """Return the same with `--sft_coef` as a term of its own."""
    added = (objective("sft", beta, weight=sft_coef, ld_alpha=ld_alpha),) if sft_coef else ()
    return objective(loss_type, beta, ld_alpha=ld_alpha, **own), *added
