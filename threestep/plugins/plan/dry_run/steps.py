"""The dry run as steps ask for it: in place of the run, and to choose by memory what was left to `auto`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threestep.plugins.plan.dry_run import one_model
from threestep.plugins.plan.dry_run.estimate import kept_counts

if TYPE_CHECKING:
    from threestep.plugins.plan.dry_run.estimate import Estimate, ModelCounts
    from training.utils.base.machine import PlannedDevice
    from training.utils.flags.flags import AutoChoice
    from training.utils.setup.flags import CheckedStep


def dry_run(step: CheckedStep) -> None:
    """Print what a step's run would be."""
    if step.kind is not None:
        one_model.dry_run(step.flags, step.scores, len(step.kind.responses))
        return
    from threestep.plugins.plan.dry_run import ppo

    ppo.dry_run(step.flags, step.components)


def estimated(step: CheckedStep, counts: ModelCounts) -> Estimate:
    """Return the estimate of a step's run."""
    if step.kind is not None:
        return one_model.estimated(step.flags, step.scores, len(step.kind.responses), counts)
    from threestep.plugins.plan.dry_run import ppo

    return ppo.estimated(step.flags, step.components, counts)


def chosen_forward(step: CheckedStep, device: PlannedDevice) -> AutoChoice:
    """Return what --per_device_train_batch_size auto stands for on `device`, with the memory that is free there."""
    assert step.kind is not None
    return one_model.chosen_forward(step.flags, step.scores, len(step.kind.responses), kept_counts(), device=device)


def chosen_reuse(step: CheckedStep, device: PlannedDevice) -> AutoChoice:
    """Return what --reuse_forwards auto stands for on `device`, with the memory that is free there."""
    from threestep.plugins.plan.dry_run import ppo

    return ppo.chosen_reuse(step.flags, step.components, device)
