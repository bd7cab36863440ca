"""Seconds of counted work on one device: the slower of arithmetic and memory, operator by operator.

A matmul's tiles are shared among the device's processors: the last round of tiles may leave most of them idle, and a
tile at an edge computes what nobody reads. A matmul then takes as long as the tiles of all rounds at the most that any
shape was measured to reach. No constant here was fitted to a row that docs/lab_book/2026-q4-gpu.md compares with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from threestep.plugins.plan.clock.devices import USUAL_SHARE

if TYPE_CHECKING:
    from threestep.plugins.plan.clock.devices import Device, Rates
    from threestep.plugins.plan.clock.work import Matmul, Work

MEMORY_SHARE = 0.9  # of the memory's rate that long copies reach
# Of the rates that kernels reach alone and at their best, what they reach in a training step, where clocks fall under
# power and kernels wait for each other. The one constant that was chosen by looking at published rows: the median
# of the sources' medians; a row of docs/lab_book/2026-q4-gpu.md is judged by the median of the other sources.
RUNNING_SHARE = 0.854
HOST_SECONDS_AN_OPERATOR = 10e-6


class WorkSeconds(NamedTuple):
    """Seconds of the device by kind of operator, and of the host that launches them."""

    matmuls: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: float = 0.0

    @property
    def device(self) -> float:
        return self.matmuls + self.attention + self.memory

    def running_at(self, share: float) -> WorkSeconds:
        """The device's seconds if its kernels reach only `share` of their rates."""
        return WorkSeconds(self.matmuls / share, self.attention / share, self.memory / share, self.launches)

    def plus(self, other: WorkSeconds, times: float = 1.0) -> WorkSeconds:
        """These seconds and `times` the others."""
        return WorkSeconds(*(mine + times * others for mine, others in zip(self, other, strict=True)))


def work_seconds(
    work: Work,
    device: Device,
    *,
    dtype: str = "bf16",
    backward: bool = False,
    fused: bool = False,
    head: bool = False,
) -> WorkSeconds:
    """Seconds of `work`. dtype: fp32, bf16, fp16 or fp8, of its matmuls. fused: a compiler joins memory-bound operators
    and launches, of which a quarter remains. head: it is the output layer's."""
    matmuls = sum(times * matmul_seconds(matmul, device, dtype) for matmul, times in work.matmuls.items())
    share = device.attention.backward if backward else device.attention.forward
    peak = matmul_rates(device, "fp32" if dtype == "fp32" else "bf16").peak * 1e12
    moved = work.fused_bytes if fused else work.moved_bytes
    by_document = device.measured is not None  # a CPU
    written, launch, apart = memory_rate(device), HOST_SECONDS_AN_OPERATOR, 0.0
    if device.measured is not None:
        size = work.moved_bytes / max(1.0, work.launches)
        written = device.measured.head_rate if head else device.measured.memory_rate(size, backward)
        launch = device.measured.launch_seconds(size, backward)
        document = device.measured.costs.document[backward] or launch
        apart = launch * work.apart_launches + document * work.apart_documents
    return WorkSeconds(
        matmuls,
        (work.attention_flops + by_document * work.apart_flops) / (share * peak),
        (moved + by_document * work.apart_bytes) / written,
        apart + work.launches * launch * (0.25 if fused else 1.0),
    )


def usual_share(device: Device) -> float:
    """The share of its rates that the device's kernels reach among others; 1 where they were measured among others."""
    return RUNNING_SHARE if device.measured is None else 1.0


def matmul_seconds(matmul: Matmul, device: Device, dtype: str) -> float:
    """The slower of the tiles' arithmetic and the operands' way through memory."""
    if device.measured is not None:
        return matmul.flops / device.measured.matmul_rate(*matmul[1:])
    rates = matmul_rates(device, dtype)
    computed = matmul.flops / (1e12 * (rates.reached or USUAL_SHARE * rates.peak) * used_share(matmul, device))
    size = {"fp32": 4, "fp8": 1}.get(dtype, 2)
    return max(computed, matmul.elements * size / memory_rate(device))


def used_share(matmul: Matmul, device: Device) -> float:
    """The share of the processors' time in a matmul that computes numbers of the result, with the best of four tiles:
    the device's, the same on its side, and smaller ones."""
    best = 0.0
    processors, tall, wide = device.tiles
    for rows, columns in {(tall, wide), (wide, tall), (128, 128), (64, 128)}:
        tiles = matmul.batch * -(-matmul.rows // rows) * -(-matmul.columns // columns)
        computed = -(-tiles // processors) * processors * rows * columns
        best = max(best, matmul.batch * matmul.rows * matmul.columns / max(computed, 1))
    return best or 1.0  # of no numbers


def matmul_rates(device: Device, dtype: str) -> Rates:
    """The rates of matmuls in `dtype`; devices without 8-bit units compute them in 16."""
    if dtype == "fp32":
        return device.half._replace(peak=device.single, reached=0.0)
    return device.eighth if dtype == "fp8" and device.eighth.peak else device.half


def memory_rate(device: Device) -> float:
    """Bytes a second."""
    if device.measured is not None:
        return device.memory_rate * 1e9
    return MEMORY_SHARE * device.memory_rate * 1e9
