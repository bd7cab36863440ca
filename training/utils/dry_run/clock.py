"""The clock of a dry run: counted work of its models, on a device of the table or on this machine's CPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.console import log_on_main
from training.utils.clock.devices import DEVICES, AttentionShares, Device, Links, Rates
from training.utils.clock.price import Bill, time_lines
from training.utils.clock.training_step import StepPlan
from training.utils.dry_run.activations import decoder_layers
from training.utils.engine.ranks.matmul_rate import measured_matmul_rate
from training.utils.engine.ranks.startup import DTYPES

if TYPE_CHECKING:
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.models.settings import ModelSettings
    from training.utils.run.run_arguments import RunArguments

_COPIED_MB = 64


def clock_device(name: str | None, dtype: str, sharing: int = 1) -> Device | None:
    """The device of --device: of the table; for `cpu` this one, measured in a third of a second. None: not known, and
    for rows that `sharing` ranks share, whose traffic is not counted yet."""
    if sharing > 1 and name not in (None, "cuda"):
        log_on_main(f"seconds: not known yet for --sequence_parallel_size {sharing}; leave it out to see them")
        return None
    return this_cpu(dtype) if name == "cpu" else DEVICES.get(name or "")


def this_cpu(dtype: str) -> Device:
    """The rates of matmuls in `dtype` and of copies, measured; attention is taken to reach a third of that rate."""
    rate = measured_matmul_rate(DTYPES[dtype], torch.device("cpu")) / 1e12
    source = torch.ones(_COPIED_MB * 2**18)
    copy, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        started = time.perf_counter()
        copy.copy_(source)
        best = min(best, time.perf_counter() - started)
    memory = 2 * source.nbytes / best / 1e9
    thirds, links = AttentionShares(0.33, 0.33), Links(memory / 2, memory / 2, memory)
    return Device(Rates(rate, rate), 0, memory, thirds, links, 1, (1, 1), "measured", single=rate)


def step_plan(
    model: Any, loading: ModelSettings, settings: EngineSettings, *, ranks: int, micro_steps: int
) -> StepPlan:
    """The plan by which `model`, on meta, trains."""
    return StepPlan(
        sum(part.numel() for part in model.parameters()),
        sum(part.numel() for part in model.parameters() if part.requires_grad),
        max(1, len(decoder_layers(model.base_model))),
        ranks,
        micro_steps,
        dtype=settings.dtype,
        zero_stage=settings.zero_stage,
        recomputed=float(loading.gradient_checkpointing),
        compiles=loading.torch_compile,
        offloads=settings.offload,
    )


def print_time(parts: dict[str, float], run: RunArguments, ranks: int, *, steps: int | None, unit: str) -> None:
    """Print seconds by part, hours and money, on rank 0."""
    name = "this CPU" if run.device == "cpu" else str(run.device)
    for sentence in time_lines(parts, name, Bill(steps, unit, ranks, run.price_per_hour)):
        log_on_main(sentence)
