"""DeepSpeed's memory for a model, in bytes of one rank: weights, gradients, optimizer state, buffers. Pure numbers.

The formulas are ZeRO's (Rajbhandari et al. 2020, section 3: 2 + 2 + 12 bytes a weight in half precision, each divided
by the ranks from the stage on that shards it), with DeepSpeed 0.19's deviations; a test compares them with the memory
of its engines (plan/memory.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.utils.base.machine import MemoryLine
from training.utils.engine.config.arguments import ADAMW, OPTIMIZERS
from training.utils.engine.config.config import DEEPSPEED_LIMITS

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# DeepSpeed 0.19's defaults, runtime/zero/config.py.
_SUB_GROUP = 1_000_000_000


@dataclass(frozen=True)
class EngineMemory:
    """parameters, gradients, optimizer, secondary and pinned are held between two micro-batches; buffers are added in a
    backward, and stepping in the optimizer's step.

    secondary: ZeRO++'s second copy of the weights, in shards of a node.
    pinned: the bytes that torch adds to pinned host memory.
    """

    parameters: MemoryLine
    gradients: MemoryLine
    optimizer: MemoryLine
    buffers: MemoryLine
    stepping: MemoryLine
    secondary: MemoryLine = MemoryLine("second copy of the weights (hpZ)", 0)
    pinned: MemoryLine = MemoryLine("pinned host memory, rounded up", 0)

    @property
    def held(self) -> tuple[MemoryLine, ...]:
        return self.parameters, self.gradients, self.optimizer, self.secondary, self.pinned

    def named(self, role: str) -> EngineMemory:
        """The same with the role's name before each line's name."""
        lines = {name: replace(line, name=f"{role}: {line.name}") for name, line in vars(self).items()}
        return EngineMemory(**lines)


def trained_memory(
    weights: int,
    trained: int,
    largest: int,
    dtype: str,
    *,
    zero: dict[str, Any],
    ranks: int,
    bf16_states: bool = False,
    optimizer: str = ADAMW,
) -> EngineMemory:
    """The memory of a model that is trained.

    weights: elements of all parameters
    trained: elements of those that train
    largest: elements of the largest module's parameters
    zero: the section `zero_optimization` of the DeepSpeed configuration
    bf16_states: master weights, gradients and moments are bfloat16
    optimizer: of --optimizer
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
        states, name = _states_of(optimizer)
        held = MemoryLine(f"optimizer: {name}" + (", float32 weights" if master else ""), 4 * states * trained + master)
        # half precision: the step makes float32 gradients of all weights (FP16_UnfusedOptimizer)
        stepping = MemoryLine("the step's buffers", max(master, bucket if ranks > 1 else 0))
        return EngineMemory(parameters, gradients, held, MemoryLine("buffers", 0), stepping)
    summed = 2 if bf16_states else 4 if dtype == "bf16" else size  # data_types.grad_accum_dtype
    master = 2 if bf16_states else 4
    gradients, stepping_bytes = _sharded_gradients(
        trained, share, (summed, master), dtype, stage=stage, offload=is_offloaded
    )
    held = _optimizer_state(share, optimizer, bf16_states, is_offloaded, in_place=dtype == "fp32" and stage < 3)
    buffers = bucket * (2 if zero.get("overlap_comm") and stage < 3 else 1)
    if stage == 3:
        buffers += gathered_elements(weights, largest, zero, trains=True) * size
    name = "reduction bucket" + (", gathered weights" if stage == 3 else "")
    copies = size * share if is_offloaded and stage < 3 else 0  # updated weights on their way back
    return EngineMemory(
        parameters,
        gradients,
        held,
        MemoryLine(name, buffers, copies),
        MemoryLine("the step's buffers", stepping_bytes),
        secondary_memory(weights, dtype, zero),
        MemoryLine("pinned host memory, rounded up", 0, _rounded_up(share, size, summed, zero)),
    )


def weights_memory(weights: int, dtype: str, zero: dict[str, Any], ranks: int) -> MemoryLine:
    """The weights alone: all that a model holds that is only read. Below ZeRO-3 it is whole."""
    size = ELEMENT_BYTES[dtype]
    if zero["stage"] < 3:
        return MemoryLine("weights", size * weights)
    share = size * -(-weights // ranks)
    offloaded = _offloaded(zero, "offload_param")
    return MemoryLine("weights, sharded", 0 if offloaded else share, share if offloaded else 0)


def pinned_shards(sizes: Sequence[int], dtype: str, zero: dict[str, Any], ranks: int) -> MemoryLine:
    """Bytes that pinning adds to the shards of a model that is only read, each of which ZeRO-3 pins separately.

    sizes: elements of each parameter
    """
    extra = 0
    if zero["stage"] == 3 and _pins(zero, "offload_param"):
        shards = [ELEMENT_BYTES[dtype] * -(-size // ranks) for size in sizes]
        extra = sum(power_of_two(shard) - shard for shard in shards)
    return MemoryLine("pinned host memory, rounded up", 0, extra)


def secondary_memory(weights: int, dtype: str, zero: dict[str, Any]) -> MemoryLine:
    """The copy that zero_hpz_partition_size adds, sharded over so many ranks (deepspeed 0.19, partition_parameters.py:
    _partition_param_sec). It is where the shards are."""
    over = zero.get("zero_hpz_partition_size", 1)
    copy = ELEMENT_BYTES[dtype] * -(-weights // over) if zero["stage"] == 3 and over > 1 else 0
    offloaded = _offloaded(zero, "offload_param")
    return MemoryLine("second copy of the weights (hpZ)", 0 if offloaded else copy, copy if offloaded else 0)


def gathered_elements(weights: int, largest: int, zero: dict[str, Any], trains: bool) -> int:
    """Elements that ZeRO-3 may hold whole at once: gathering ahead ends with the weight that passes the limit, and a
    module that is needed is gathered at once.

    A model that trains also keeps the weights whose next use is within stage3_max_reuse_distance elements of the
    trace: the last half of that distance in the forward comes first in the backward (deepspeed 0.19,
    partitioned_param_coordinator.py: __params_to_release).
    """
    whole = zero.get("stage3_max_live_parameters", DEEPSPEED_LIMITS["stage3_max_live_parameters"])
    if trains:
        distance = zero.get("stage3_max_reuse_distance", DEEPSPEED_LIMITS["stage3_max_reuse_distance"])
        whole = max(whole, distance // 2)
    return min(weights, whole + largest)


def _optimizer_state(
    share: int, optimizer: str, bf16_states: bool, is_offloaded: bool, *, in_place: bool
) -> MemoryLine:
    """Master weights and the optimizer's states; in float32 training too stage 3 copies the weights, and so do stages 1
    and 2 with offload (`training_engine._train_in_place`)."""
    states, own = _states_of(optimizer)
    name, a_weight = f"optimizer: {own}, float32 weights", 4 * states + 4
    if in_place and not is_offloaded:
        name, a_weight = f"optimizer: {own}", 4 * states
    if bf16_states:
        name, a_weight = f"optimizer: {own}, weights, in bfloat16", 2 * states + 2
    state = a_weight * share
    return MemoryLine(name, 0, state) if is_offloaded else MemoryLine(name, state)


def _sharded_gradients(
    trained: int, share: int, element_bytes: tuple[int, int], dtype: str, *, stage: int, offload: bool
) -> tuple[MemoryLine, int]:
    """Gradients between micro-batches, and the bytes of the step's buffers. element_bytes: of a summed gradient, and of
    the optimizer's."""
    summed, master = element_bytes
    moved = 4 * share if offload else 0  # float32, for the optimizer on the CPU
    if stage == 3:
        held = summed * share
        return MemoryLine("gradients, sharded", 0 if offload else held, held + moved if offload else 0), 0
    if stage == 2:
        return MemoryLine("gradients, sharded", summed * share, moved), master * share
    if dtype == "bf16" and summed == 4 and not offload:  # BF16_Optimizer: float32 sums, and the backward's
        return MemoryLine("gradients", (4 + 2) * trained), 0
    return MemoryLine("gradients", summed * trained, moved), master * share


def _rounded_up(share: int, size: int, summed: int, zero: dict[str, Any]) -> int:
    """Bytes that torch adds to the pinned host memory of a model that trains.

    Blocks are powers of two (torch 2.13, CachingHostAllocator.h: PowerOf2Ceil). Pinned are: below stage 3 the float32
    weights, their gradients and the weights on their way back (deepspeed 0.19, stage_1_and_2.py); in it the shards of
    the weights, the summed gradients, and the gradient of each sub-group (stage3.py). One group is counted, that of the
    matrices.
    """
    blocks: list[int] = []
    if _pins(zero, "offload_optimizer"):
        if zero["stage"] < 3:
            blocks += [4 * share, 4 * share, size * share]
        else:
            group = min(share, zero.get("sub_group_size", _SUB_GROUP))
            blocks += [summed * share, *[4 * group] * (share // max(group, 1)), 4 * (share % max(group, 1))]
    if zero["stage"] == 3 and _pins(zero, "offload_param"):
        blocks.append(size * share)
    return sum(power_of_two(block) - block for block in blocks)


def power_of_two(amount: int) -> int:
    """Bytes of the block of pinned memory that torch takes for `amount`."""
    return 1 << (amount - 1).bit_length() if amount > 0 else 0


def _offloaded(zero: dict[str, Any], section: str) -> bool:
    return (zero.get(section) or {}).get("device", "none") in ("cpu", "nvme")


def _pins(zero: dict[str, Any], section: str) -> bool:
    return _offloaded(zero, section) and bool((zero.get(section) or {}).get("pin_memory", False))


def _states_of(name: str) -> tuple[int, str]:
    """Return how many numbers an optimizer keeps of each weight, and a name for them."""
    entry = OPTIMIZERS[name]
    return entry.states, entry.states_name or f"states of {name}"
