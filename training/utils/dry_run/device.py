"""The device that a dry run plans for: this machine's, or one that it does not have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.utils.clock.devices import DEVICES

_GIB = 2**30
_ALLOWANCE = 0.1  # of a GPU's memory, for CUDA's context, the collectives' buffers and fragmentation


@dataclass(frozen=True)
class PlannedDevice:
    """memory_bytes: of one GPU; None if unknown, and on a CPU."""

    is_cuda: bool
    memory_bytes: int | None = None

    @property
    def room_bytes(self) -> float:
        """The most that tensors may take beside what is no tensor; without bound if the memory is unknown."""
        return float("inf") if self.memory_bytes is None else (1 - _ALLOWANCE) * self.memory_bytes

    def leaves_room(self, most_bytes: int) -> bool:
        """Return whether tensors of `most_bytes` fit."""
        return most_bytes <= self.room_bytes

    def verdict(self, most_bytes: int) -> str | None:
        """A sentence on whether tensors of `most_bytes` fit; None if the device's memory is unknown."""
        if self.memory_bytes is None:
            return None
        size = f"a GPU of {self.memory_bytes / 1e9:g} GB ({self.memory_bytes / _GIB:.1f} GiB)"
        share = f"{most_bytes / self.memory_bytes:.0%} of it"
        if most_bytes > self.memory_bytes:
            return f"this does not fit {size}: {share}; the flags that help are in docs/scale.md"
        if not self.leaves_room(most_bytes):
            return (
                f"this hardly fits {size}: {share}, and CUDA's context, the collectives' buffers and fragmentation "
                f"take about {_ALLOWANCE:.0%}"
            )
        return f"this fits {size}: {share}"


def planned_device(kind: str | None, memory_gb: float | None) -> PlannedDevice:
    """Return the device of --device and --device_memory_gb; None for this machine's."""
    has_cuda = torch.cuda.is_available()
    known = DEVICES.get(kind or "")
    is_cuda = kind == "cuda" or known is not None or (kind is None and (has_cuda or memory_gb is not None))
    if not is_cuda:
        return PlannedDevice(False)
    if memory_gb is not None:
        return PlannedDevice(True, int(memory_gb * 1e9))
    if known is not None:
        return PlannedDevice(True, int(known.memory_gb * 1e9))
    return PlannedDevice(True, torch.cuda.get_device_properties(0).total_memory if has_cuda else None)
