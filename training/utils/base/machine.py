"""The machine: its cores, a free port, and memory: what a rank should take before a run, and running out of it, in
one sentence that names the flags that help. Recognises torch's errors without importing it. Cheap to import."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from training.utils.base.errors import first_line

_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_out_of_memory(problem: BaseException) -> bool:
    """True if the allocator of a device, of the CPU or of Python ran out of memory."""
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return isinstance(problem, (RuntimeError, OSError)) and any(words in str(problem) for words in _CPU_ALLOCATOR)


def out_of_memory_sentence(problem: BaseException, where: str = "") -> str:
    """where: what was being computed, and the lengths of its rows; "" if unknown."""
    return (
        f"out of memory{where}: lower --max_tokens_per_micro_batch or the batch size, shorten the sequences "
        "(--max_seq_len; in step 3 --max_prompt_seq_len and --max_answer_seq_len), raise --zero_stage (in step 3 "
        "--actor_zero_stage and --critic_zero_stage), or turn on --gradient_checkpointing (in step 3 "
        f"--actor_gradient_checkpointing and --critic_gradient_checkpointing) or --offload; the allocator reported: "
        f"{first_line(problem)}"
    )


SHARE_OF_OTHERS = 0.1  # of a GPU's memory, for CUDA's context, the collectives' buffers and fragmentation


@dataclass(frozen=True)
class MemoryLine:
    """A row of a table, in bytes of one rank: on its device (GPU, or the CPU that it trains on), and on the host."""

    name: str
    device_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class Moment:
    """Memory that is held for a while only, besides the permanent one. doing: as in "in a backward"."""

    doing: str
    lines: tuple[MemoryLine, ...]


@dataclass(frozen=True)
class PlannedDevice:
    """memory_bytes: of one GPU, or what is free of it; None if unknown, and on a CPU whose memory is not asked."""

    is_cuda: bool
    memory_bytes: int | None = None

    @property
    def room_bytes(self) -> float:
        """The most that tensors may take beside what is no tensor; without bound if the memory is unknown."""
        return float("inf") if self.memory_bytes is None else (1 - SHARE_OF_OTHERS) * self.memory_bytes

    def leaves_room(self, most_bytes: int) -> bool:
        """Return whether tensors of `most_bytes` fit."""
        return most_bytes <= self.room_bytes
