"""The clock of a dry run: counted work of its models, on a device of the table or on this machine's CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from threestep.plugins.plan.clock.devices import DEVICES, FILE_SUFFIX, Device, read_device
from threestep.plugins.plan.clock.price import Bill, time_lines
from threestep.plugins.plan.clock.training_step import StepPlan
from threestep.plugins.plan.dry_run.activations import decoder_layers
from threestep.plugins.plan.dry_run.cpu_rates import measured_cpu
from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks.startup import DTYPES
from training.utils.models.row_sharing import ALONE, RowSharing

if TYPE_CHECKING:
    from threestep.plugins.plan.arguments import DryRunArguments
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.models.settings import ModelSettings


def clock_device(
    name: str | None,
    dtype: str,
    sharing: RowSharing = ALONE,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    ranks: int = 1,
) -> Device | None:
    """The device of --device: of the table; for `cpu` this one, measured in seconds as a run of these
    settings computes, with the threads that a rank has of it, if `ranks` share it. None: not known, and for rows that
    ranks share, whose traffic is not counted yet."""
    if sharing.size > 1 and name not in (None, "cuda"):
        log_on_main(f"times: not yet available with {sharing.flag} {sharing.size}; remove {sharing.flag} to see them")
        return None
    if name is not None and name.endswith(FILE_SUFFIX):
        return device_of_file(name)
    return measured_cpu(DTYPES[dtype], settings, ranks) if name == "cpu" else DEVICES.get(name or "")


def device_of_file(path: str) -> Device:
    """The device that `python -m benchmarks.clock --measure` wrote. ThreestepError if the file holds none."""
    try:
        return read_device(Path(path).read_text(encoding="utf-8"))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ThreestepError(
            f"--device {path} expects a file written by `python -m benchmarks.clock --measure`, got "
            f"{type(error).__name__}: {error}; measure again, or use a device name"
        ) from error


def step_plan(
    model: Any, loading: ModelSettings, settings: EngineSettings, *, ranks: int, micro_steps: int
) -> StepPlan:
    """The plan by which `model`, on meta, trains."""
    for untimed in sorted({each.untimed for each in loading.preparers if each.untimed}):
        log_on_main(f"times do not include {untimed}")
    return StepPlan(
        sum(part.numel() for part in model.parameters()),
        sum(part.numel() for part in model.parameters() if part.requires_grad),
        max(1, len(decoder_layers(model.base_model))),
        ranks,
        micro_steps,
        dtype=settings.dtype,
        zero_stage=settings.zero_stage,
        recomputed=float(loading.gradient_checkpointing),
        compiles=loading.compiles,
        offloads=settings.offload,
    )


def print_time(parts: dict[str, float], flags: DryRunArguments, ranks: int, *, steps: int | None, unit: str) -> None:
    """Print seconds by part, hours and money, on rank 0."""
    name = "this CPU" if flags.device == "cpu" else str(flags.device)
    for sentence in time_lines(parts, name, Bill(steps, unit, ranks, flags.price_per_hour)):
        log_on_main(sentence)
