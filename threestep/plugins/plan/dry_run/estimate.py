"""The result of a dry run, to print or to search by; and its counts of models, which a search keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from threestep.plugins.plan.dry_run.activations import saved_activations
from threestep.plugins.plan.dry_run.clock import print_time
from threestep.plugins.plan.dry_run.device import verdict
from threestep.plugins.plan.dry_run.meta import as_counted, model_on_meta
from threestep.plugins.plan.dry_run.operators import training_work
from threestep.plugins.plan.dry_run.table import most_at_once, print_memory, print_plan, total

if TYPE_CHECKING:
    from threestep.plugins.plan.arguments import DryRunArguments
    from threestep.plugins.plan.clock.training_step import Parts
    from training.utils.base.machine import MemoryLine, Moment, PlannedDevice
    from training.utils.models.settings import ModelSettings

ROLLING_OUT = "rolling out"  # the moment of step 3 that a rollout engine decides


class ModelCounts(NamedTuple):
    """Functions that build a model, and count its activations and its work."""

    model: Callable[..., Any] = model_on_meta
    activations: Callable[..., Any] = saved_activations
    work: Callable[..., Any] = training_work


def kept_counts() -> ModelCounts:
    """ModelCounts that build and count each thing once, for many dry runs of the same models."""
    build = functools.cache(model_on_meta)

    def model(settings: ModelSettings, *others: Any) -> Any:
        return build(as_counted(settings), *others)

    return ModelCounts(model, functools.cache(saved_activations), functools.cache(training_work))


@dataclass(frozen=True)
class Estimate:
    """plan: sentences. held, moments: memory of a rank. parts: counts the seconds of one `unit`; None on a device of
    unknown speed. steps: such units of the run, None if no flag bounds them. sharing: how many ranks could share a row,
    in ascending order."""

    plan: Sequence[str]
    held: Sequence[MemoryLine]
    moments: Sequence[Moment]
    device: PlannedDevice
    parts: Callable[[], Parts | None]
    steps: int | None
    sharing: Sequence[int] = (1,)
    unit: str = "step"

    def most(self, without: str | None = None) -> MemoryLine:
        """The most memory at once, in any moment but the one of that name."""
        sums = most_at_once(self.held, [moment for moment in self.moments if moment.doing != without])
        return replace(
            total((), "most at once"),
            device_bytes=max(one.device_bytes for one in sums),
            host_bytes=max(one.host_bytes for one in sums),
        )

    def most_bytes(self, device: PlannedDevice) -> int:
        """The most of the device's memory at once; a CPU's is the host's."""
        most = self.most()
        return most.device_bytes + (0 if device.is_cuda else most.host_bytes)


def print_estimate(
    estimate: Estimate, program: str, flags: DryRunArguments, settings: Mapping[str, Any], *, ranks: int
) -> None:
    """Print settings, plan, memory and seconds, on rank 0."""
    print_plan(program, ranks, settings, estimate.plan)
    print_memory(estimate.held, estimate.moments, functools.partial(verdict, estimate.device))
    parts = estimate.parts()
    if parts is not None:
        print_time(parts, flags, ranks, steps=estimate.steps, unit=estimate.unit)
