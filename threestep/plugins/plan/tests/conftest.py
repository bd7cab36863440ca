"""A made-up machine: memory and seconds by a formula that a person can follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from threestep.plugins.plan.choices import Settings, Wanted
from threestep.plugins.plan.dry_run.estimate import Estimate
from training.utils.base.machine import MemoryLine, Moment, PlannedDevice


@pytest.fixture
def wanted() -> Callable[..., Wanted]:
    def build(ranks: int = 4, gpu_bytes: int = 1000, sequences: int = 16, host_bytes: int = 1000) -> Wanted:
        return Wanted("h100", ranks, sequences, (8, 8), gpu_bytes, host_bytes, {"model_name_or_path": "m"})

    return build


@pytest.fixture
def estimates() -> Callable[[Settings], Estimate]:
    """800 bytes of a model, a quarter of them with ZeRO-3, on the host with offload; 100 of a sequence in a forward, 25
    recomputed. A micro-step takes 2 s and 1 a sequence, half as much again recomputed; ZeRO-3 1 s; offload 5 s a step.
    """

    def estimate(settings: Settings) -> Estimate:
        recomputes, size = settings["gradient_checkpointing"], settings["per_device_train_batch_size"]
        model = 200 if settings["zero_stage"] == 3 else 800
        held = MemoryLine("model", 0, model) if settings["offload"] else MemoryLine("model", model)
        forward = Moment("in a backward", (MemoryLine("activations", (25 if recomputes else 100) * size),))
        steps = settings["gradient_accumulation_steps"]
        parts = {"matmuls": steps * (2.0 + size), "traffic": steps * float(settings["zero_stage"] == 3)}
        parts["recomputation"] = 0.5 * parts["matmuls"] * recomputes
        parts["offload"] = 5.0 * settings["offload"]
        return Estimate([], [held], [forward], PlannedDevice(True, 1000), lambda: parts, None)

    return estimate
