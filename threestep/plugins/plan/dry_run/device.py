"""The device that a dry run plans for: this machine's or another; and whether a run fits it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.plan.clock.devices import DEVICES
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import SHARE_OF_OTHERS, PlannedDevice

if TYPE_CHECKING:
    from threestep.plugins.plan.arguments import DryRunArguments

_GIB = 2**30


def verdict(device: PlannedDevice, most_bytes: int) -> str | None:
    """A sentence on how tensors of `most_bytes` fit; None if they do not, or the device's memory is unknown."""
    if device.memory_bytes is None or most_bytes > device.memory_bytes:
        return None
    size, share = _size_and_share(device.memory_bytes, most_bytes)
    if not device.leaves_room(most_bytes):
        return (
            f"this barely fits {size}: {share}, but CUDA's context, the collectives' buffers and fragmentation "
            f"also need about {SHARE_OF_OTHERS:.0%}"
        )
    return f"this fits {size}: {share}"


def check_fits(device: PlannedDevice, most_bytes: int, settings: Mapping[str, Any], ranks: int) -> None:
    """Raise ThreestepError, with flags that help, if tensors of `most_bytes` do not fit. settings: by flag names"""
    if device.memory_bytes is not None and most_bytes > device.memory_bytes:
        size, share = _size_and_share(device.memory_bytes, most_bytes)
        raise ThreestepError(f"this does not fit on {size}: {share}; try {', '.join(_remedies(settings, ranks))}")


def _size_and_share(memory_bytes: int, most_bytes: int) -> tuple[str, str]:
    size = f"a GPU of {memory_bytes / 1e9:g} GB ({memory_bytes / _GIB:.1f} GiB)"
    return size, f"{most_bytes / memory_bytes:.0%} of it"


def _remedies(settings: Mapping[str, Any], ranks: int) -> list[str]:
    """Return flags that need less memory than `settings`, the cheapest first."""
    found = []
    for name, value in settings.items():
        if name.endswith("gradient_checkpointing") and not value:
            found.append(f"--{name} true")
        elif name.endswith("zero_stage") and value is not None and value < 3 and ranks > 1:
            found.append(f"--{name} 3")
    if settings.get("max_tokens_per_micro_batch") is None:
        found.append("--max_tokens_per_micro_batch 2048")
    found += ["--lora_dim 16"] if not settings.get("lora_dim", settings.get("actor_lora_dim", 1)) else []
    found += ["--offload true"] if not settings.get("offload", True) else []
    return [*found, f"--num_ranks above {ranks}"]


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
