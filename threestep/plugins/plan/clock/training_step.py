"""Seconds of an optimizer step by parts: counted work, traffic that computation does not hide, optimizer, offload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from threestep.plugins.plan.clock.roofline import WorkSeconds, memory_rate, usual_share, work_seconds
from threestep.plugins.plan.clock.traffic import exposed_gather_seconds, gather_seconds, zero_traffic

if TYPE_CHECKING:
    from threestep.plugins.plan.clock.devices import Device
    from threestep.plugins.plan.clock.work import TrainingWork

# AdamW reads and writes master weights and two moments in float32, reads gradients, and writes weights: 3 x 8 + 4 + 2;
# the norm of the gradients reads them once more.
_ADAM_BYTES = 34
_HOST_MEMORY_RATE = 100e9  # bytes a second of a rank's share of its host: two sockets of 8 channels for 8 ranks [M]


@dataclass(frozen=True)
class StepPlan:
    """The settings by which a model trains.

    weights, trained: numbers. layers: among which traffic is cut. dtype: of matmuls. recomputed: share of a forward
    that the backward computes again.
    """

    weights: float
    trained: float
    layers: int
    ranks: int
    micro_steps: int
    dtype: str = "bf16"
    zero_stage: int = 0
    recomputed: float = 0.0
    compiles: bool = False
    offloads: bool = False


Parts = dict[str, float]  # seconds by part, in the order of a step


def step_parts(work: TrainingWork, plan: StepPlan, device: Device, running_share: float | None = None) -> Parts:
    """Seconds of one optimizer step. Gathers of a forward hide behind its computation, gathers and reductions of a
    backward behind that; what is longer is waited for. The host's launches likewise, but a CPU's, which is its host.
    running_share: of the device's rates; default: the usual one.
    """

    def seconds(part: str, backward: bool = False) -> WorkSeconds:
        # The output layer stays in 16 bits where others compute in 8.
        dtype = "bf16" if part == "head" and plan.dtype == "fp8" else plan.dtype
        counted = work_seconds(
            getattr(work, part), device, dtype=dtype, backward=backward, fused=plan.compiles, head=part == "head"
        )
        return counted.running_at(usual_share(device) if running_share is None else running_share)

    forward, backward, head = seconds("forward"), seconds("backward", backward=True), seconds("head")
    again = WorkSeconds().plus(forward, plan.recomputed)
    exposed = _traffic(plan, device, forward.device, backward.device + again.device + head.device)
    body = forward.plus(backward)
    launched = body.plus(head).plus(again)
    steps = plan.micro_steps
    parts = {
        "matmuls": steps * body.matmuls,
        "attention": steps * body.attention,
        "memory-bound operators": steps * body.memory,
        "output layer": steps * head.device,
        "recomputation": steps * again.device,
        "kernel launches by the host": steps * _launches(launched, device),
        "traffic": exposed,
        **_optimizer(plan, device),
    }
    return {name: spent for name, spent in parts.items() if spent > 0}


def _launches(work: WorkSeconds, device: Device) -> float:
    """Seconds of the host that a GPU's do not hide; of a CPU, which is the host, all."""
    return work.launches if device.measured is not None else max(0.0, work.launches - work.device)


def _traffic(plan: StepPlan, device: Device, forward: float, backward: float) -> float:
    """Seconds that a step waits for collectives. forward, backward: of the device, in one micro-step."""
    size = 4 if plan.dtype == "fp32" else 2
    gathered = size * plan.weights
    reduced = size * plan.trained
    traffic = zero_traffic(gathered, reduced, plan.zero_stage)

    def gather(part: float) -> float:
        return gather_seconds(part, plan.ranks, device, plan.layers)

    before = exposed_gather_seconds(traffic.gathered_forward, plan.ranks, device, layers=plan.layers, computed=forward)
    during = gather(traffic.gathered_backward) + gather(traffic.reduced)
    in_micro_steps = plan.micro_steps * (before + max(0.0, during - backward))
    once = max(0.0, gather(traffic.reduced_once) - backward) + gather(traffic.at_the_end)
    return in_micro_steps + once


def _optimizer(plan: StepPlan, device: Device) -> Parts:
    shards = plan.ranks if plan.zero_stage else 1
    numbers = plan.trained / shards
    if device.measured is not None:
        costs = device.measured.costs
        once = costs.step + plan.layers * costs.layer
        itself = once + plan.micro_steps * (costs.micro_step + plan.layers * costs.layer_micro_step)
        return {"optimizer": numbers / device.measured.optimizer_rate(numbers), "the step itself": itself}
    if not plan.offloads:
        return {"optimizer": _ADAM_BYTES * numbers / memory_rate(device)}
    size = 4 if plan.dtype == "fp32" else 2
    return {
        "optimizer on the host": _ADAM_BYTES * numbers / _HOST_MEMORY_RATE,
        "offload": 2 * size * numbers / (device.links.host * 1e9),
    }
