"""The device that a dry run plans for: this machine's, or one that it does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from threestep.plugins.plan.clock.devices import DEVICES
from training.utils.base.machine import SHARE_OF_OTHERS, PlannedDevice

if TYPE_CHECKING:
    from threestep.plugins.plan.arguments import DryRunArguments

_GIB = 2**30


def verdict(device: PlannedDevice, most_bytes: int) -> str | None:
    """A sentence on whether tensors of `most_bytes` fit; None if the device's memory is unknown."""
    if device.memory_bytes is None:
        return None
    size = f"a GPU of {device.memory_bytes / 1e9:g} GB ({device.memory_bytes / _GIB:.1f} GiB)"
    share = f"{most_bytes / device.memory_bytes:.0%} of it"
    if most_bytes > device.memory_bytes:
        return f"this does not fit {size}: {share}; the flags that help are in threestep/plugins/plan/memory.md"
    if not device.leaves_room(most_bytes):
        return (
            f"this hardly fits {size}: {share}, and CUDA's context, the collectives' buffers and fragmentation "
            f"take about {SHARE_OF_OTHERS:.0%}"
        )
    return f"this fits {size}: {share}"


def planned_device(flags: DryRunArguments) -> PlannedDevice:
    """Return the device of --device and --device_memory_gb; without them this machine's."""
    kind, memory_gb = flags.device, flags.device_memory_gb
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
