"""What DeepSpeed holds of a model, in bytes of one rank: weights, gradients, optimizer state, buffers.

The formulas are those of ZeRO (Rajbhandari et al. 2020, section 3: 2 + 2 + 12 bytes a weight in half precision, each
divided by the ranks from the stage on that shards it), with what DeepSpeed 0.19 does differently; a test
compares them with what its engines hold (docs/scale.md). Pure numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class MemoryLine:
    """What, and the bytes of one rank: of its device (GPU, or the CPU it trains on), and of the host's memory."""

    what: str
    device_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class EngineMemory:
    """Between two micro-batches, gradients included: parameters, gradients, optimizer. In a backward beside them:
    buffers; in the optimizer's step: stepping."""

    parameters: MemoryLine
    gradients: MemoryLine
    optimizer: MemoryLine
    buffers: MemoryLine
    stepping: MemoryLine

    @property
    def held(self) -> tuple[MemoryLine, ...]:
        return self.parameters, self.gradients, self.optimizer

    def named(self, role: str) -> EngineMemory:
        """With the role's name before each line's."""
        lines = {name: replace(line, what=f"{role}: {line.what}") for name, line in vars(self).items()}
        return EngineMemory(**lines)


def trained_memory(
    weights: int, trainable: Sequence[int], largest: int, dtype: str, zero: dict[str, Any], ranks: int
) -> EngineMemory:
    """Of a model that is trained.

    weights: elements of all parameters; trainable: of each that trains; largest: of the largest module's. zero: the
    section `zero_optimization` of the DeepSpeed configuration.
    """
    size = ELEMENT_BYTES[dtype]
    stage = zero["stage"]
    trained = sum(trainable)
    share = -(-trained // ranks)  # DeepSpeed pads to whole shares: a few elements more
    optimizer_leaves = _leaves(zero, "offload_optimizer")
    parameters = _parameters(weights, size, zero, ranks)
    bucket = min(zero["reduce_bucket_size"], max(trained, 1)) * size
    if stage == 0:
        master = 0 if dtype == "fp32" else 4 * trained
        return EngineMemory(
            parameters=parameters,
            gradients=MemoryLine("gradients", size * trained),
            optimizer=MemoryLine(
                "optimizer: AdamW's moments" + (", float32 weights" if master else ""), 8 * trained + master
            ),
            # half precision: the step makes float32 gradients of all weights (FP16_UnfusedOptimizer)
            buffers=MemoryLine("buffers", 0),
            stepping=MemoryLine("the step's buffers", max(master, bucket if ranks > 1 else 0)),
        )
    gradients, step_buffer = _sharded_gradients(trained, share, dtype, stage, optimizer_leaves)
    state = 12 * share  # float32 weights, and two moments, in float32 training too: stages 1 to 3 copy the weights
    what = "optimizer: AdamW's moments, float32 weights"
    optimizer = MemoryLine(what, 0, state) if optimizer_leaves else MemoryLine(what, state)
    buffers = bucket * (2 if zero.get("overlap_comm") and stage < 3 else 1)
    if stage == 3:
        buffers += _gathered(weights, largest, zero) * size
    what = "reduction bucket" + (", gathered weights" if stage == 3 else "")
    copies = size * share if optimizer_leaves and stage < 3 else 0  # updated weights on their way back
    return EngineMemory(parameters, gradients, optimizer, MemoryLine(what, buffers, copies), step_buffer)


def frozen_memory(weights: int, largest: int, dtype: str, zero: dict[str, Any], ranks: int) -> tuple[MemoryLine, int]:
    """Of a model that is only read: its weights, and the bytes gathered while it is read. Below ZeRO-3 it is whole."""
    size = ELEMENT_BYTES[dtype]
    gathered = _gathered(weights, largest, zero) * size if zero["stage"] == 3 else 0
    return _parameters(weights, size, zero, ranks), gathered


def _parameters(weights: int, size: int, zero: dict[str, Any], ranks: int) -> MemoryLine:
    if zero["stage"] < 3:
        return MemoryLine("weights", size * weights)
    share = size * -(-weights // ranks)
    leaves = _leaves(zero, "offload_param")
    return MemoryLine("weights, sharded", 0 if leaves else share, share if leaves else 0)


def _sharded_gradients(
    trained: int, share: int, dtype: str, stage: int, offload: bool
) -> tuple[MemoryLine, MemoryLine]:
    """Gradients between micro-batches, and what the step makes of them."""
    summed = 4 if dtype == "bf16" else ELEMENT_BYTES[dtype]  # bf16 adds up in float32 (data_types.grad_accum_dtype)
    moved = 4 * share if offload else 0  # float32, for the optimizer on the CPU
    if stage == 3:
        held = summed * share
        line = MemoryLine("gradients, sharded", 0 if offload else held, held + moved if offload else 0)
        return line, MemoryLine("the step's buffers", 0)
    if stage == 2:
        return MemoryLine("gradients, sharded", summed * share, moved), MemoryLine("the step's buffers", 4 * share)
    if dtype == "bf16" and not offload:  # BF16_Optimizer: whole float32 sums, and the bf16 gradients of the backward
        return MemoryLine("gradients", (4 + 2) * trained), MemoryLine("the step's buffers", 0)
    return MemoryLine("gradients", summed * trained, moved), MemoryLine("the step's buffers", 4 * share)


def _gathered(weights: int, largest: int, zero: dict[str, Any]) -> int:
    """Elements that ZeRO-3 may hold whole at once: what the configuration lets live, or one module that is larger."""
    return min(weights, max(largest, zero.get("stage3_max_live_parameters", 1_000_000_000)))


def _leaves(zero: dict[str, Any], section: str) -> bool:
    return (zero.get(section) or {}).get("device", "none") in ("cpu", "nvme")
