"""Memory of a rank that is reckoned before a run, as all who hold some tell it. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass

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
