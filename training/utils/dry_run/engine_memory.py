"""What DeepSpeed holds for a model, in bytes of one rank: weights, gradients, optimizer state, buffers. Pure numbers.

The formulas are ZeRO's (Rajbhandari et al. 2020, section 3: 2 + 2 + 12 bytes a weight in half precision, each divided
by the ranks from the stage on that shards it), with what DeepSpeed 0.19 does differently; a test compares them with
what its engines hold (docs/scale.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from training.utils.dry_run.table import MemoryLine
from training.utils.engine.config import DEEPSPEED_LIMITS

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class EngineMemory:
    """parameters, gradients and optimizer are held between two micro-batches; buffers are added in a backward, and
    stepping in the optimizer's step."""

    parameters: MemoryLine
    gradients: MemoryLine
    optimizer: MemoryLine
    buffers: MemoryLine
    stepping: MemoryLine

    @property
    def held(self) -> tuple[MemoryLine, ...]:
        return self.parameters, self.gradients, self.optimizer

    def named(self, role: str) -> EngineMemory:
        """With the role's name before each line's name."""
        lines = {name: replace(line, name=f"{role}: {line.name}") for name, line in vars(self).items()}
        return EngineMemory(**lines)


def trained_memory(
    weights: int, trained: int, largest: int, dtype: str, zero: dict[str, Any], ranks: int
) -> EngineMemory:
    """The memory of a model that is trained.

    weights: elements of all parameters
    trained: elements of those that train
    largest: elements of the largest module's parameters
    zero: the section `zero_optimization` of the DeepSpeed configuration
    """
    size = ELEMENT_BYTES[dtype]
    stage = zero["stage"]
    share = -(-trained // ranks)  # DeepSpeed pads to whole shares: a few elements more
    is_offloaded = _offloaded(zero, "offload_optimizer")
    parameters = weights_memory(weights, dtype, zero, ranks)
    bucket = min(zero["reduce_bucket_size"], max(trained, 1)) * size
    if stage == 0:
        master = 0 if dtype == "fp32" else 4 * trained
        gradients = MemoryLine("gradients", size * trained)
        name = "optimizer: AdamW's moments" + (", float32 weights" if master else "")
        optimizer = MemoryLine(name, 8 * trained + master)
        # half precision: the step makes float32 gradients of all weights (FP16_UnfusedOptimizer)
        stepping = MemoryLine("the step's buffers", max(master, bucket if ranks > 1 else 0))
        return EngineMemory(parameters, gradients, optimizer, MemoryLine("buffers", 0), stepping)
    gradients, stepping_bytes = _sharded_gradients(trained, share, dtype, stage, is_offloaded)
    state = 12 * share  # float32 weights, and two moments, in float32 training too: stages 1 to 3 copy the weights
    name = "optimizer: AdamW's moments, float32 weights"
    optimizer = MemoryLine(name, 0, state) if is_offloaded else MemoryLine(name, state)
    buffers = bucket * (2 if zero.get("overlap_comm") and stage < 3 else 1)
    if stage == 3:
        buffers += gathered_elements(weights, largest, zero, trains=True) * size
    name = "reduction bucket" + (", gathered weights" if stage == 3 else "")
    copies = size * share if is_offloaded and stage < 3 else 0  # updated weights on their way back
    stepping = MemoryLine("the step's buffers", stepping_bytes)
    return EngineMemory(parameters, gradients, optimizer, MemoryLine(name, buffers, copies), stepping)


def weights_memory(weights: int, dtype: str, zero: dict[str, Any], ranks: int) -> MemoryLine:
    """The weights alone: all that a model holds that is only read. Below ZeRO-3 it is whole."""
    size = ELEMENT_BYTES[dtype]
    if zero["stage"] < 3:
        return MemoryLine("weights", size * weights)
    share = size * -(-weights // ranks)
    offloaded = _offloaded(zero, "offload_param")
    return MemoryLine("weights, sharded", 0 if offloaded else share, share if offloaded else 0)


def _sharded_gradients(trained: int, share: int, dtype: str, stage: int, offload: bool) -> tuple[MemoryLine, int]:
    """Gradients between micro-batches, and the bytes of the step's buffers."""
    summed = 4 if dtype == "bf16" else ELEMENT_BYTES[dtype]  # bf16 accumulates in float32 (data_types.grad_accum_dtype)
    moved = 4 * share if offload else 0  # float32, for the optimizer on the CPU
    if stage == 3:
        held = summed * share
        return MemoryLine("gradients, sharded", 0 if offload else held, held + moved if offload else 0), 0
    if stage == 2:
        return MemoryLine("gradients, sharded", summed * share, moved), 4 * share
    if dtype == "bf16" and not offload:  # BF16_Optimizer: whole float32 sums, and the bf16 gradients of the backward
        return MemoryLine("gradients", (4 + 2) * trained), 0
    return MemoryLine("gradients", summed * trained, moved), 4 * share


def gathered_elements(weights: int, largest: int, zero: dict[str, Any], trains: bool) -> int:
    """Elements that ZeRO-3 may hold whole at once: gathering ahead ends with the weight that passes the limit, and a
    module that is needed is gathered at once.

    A model that trains also keeps what is used again within the reuse distance: at the turn from forward to backward
    half of it before and half after (deepspeed 0.19, partitioned_param_coordinator.py: __params_to_release).
    """
    whole = zero.get("stage3_max_live_parameters", DEEPSPEED_LIMITS["stage3_max_live_parameters"])
    if trains:
        distance = zero.get("stage3_max_reuse_distance", DEEPSPEED_LIMITS["stage3_max_reuse_distance"])
        whole = max(whole, distance // 2)
    return min(weights, whole + largest)


def _offloaded(zero: dict[str, Any], section: str) -> bool:
    return (zero.get(section) or {}).get("device", "none") in ("cpu", "nvme")
