"""Batches on their way to the device: pinned where they are made, and copied without waiting.

The copy of pinned memory to a GPU runs beside the host; any other waits for what the GPU does before it.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

Batch = TypeVar("Batch")


def pinned(batch: Batch, device: torch.device) -> Batch:
    """Return the batch, a dataclass, a tensor on the CPU or a tuple of these, with its tensors in pinned memory if
    `device` is a GPU."""
    return _all(batch, lambda part: part.pin_memory(), leaves=True) if device.type == "cuda" else batch


def moved(batch: Batch, device: torch.device | str) -> Batch:
    """Return the batch, a dataclass, a tensor or a tuple of these, with its tensors on `device`."""
    # Without waiting where they are pinned; torch keeps pinned memory until its copies are done.
    return _all(batch, lambda part: part.to(device, non_blocking=True))


def _all(batch: Any, act: Any, leaves: bool = False) -> Any:
    is_tuple = type(batch) is tuple  # not a named one
    return tuple(_all(part, act, leaves) for part in batch) if is_tuple else _each(batch, act, leaves)


def _each(batch: Any, act: Any, leaves: bool = False) -> Any:
    """The same batch with each of its tensors, also of the records inside it, after `act`. Tuples inside it stay: they
    are documents, which the host reads. leaves: records that keep more for a device (`leaving_host`) get it first."""
    if isinstance(batch, torch.Tensor):
        return act(batch)
    if isinstance(batch, dict):
        return {name: _each(part, act, leaves) for name, part in batch.items()}
    if not is_dataclass(batch) or isinstance(batch, type):
        return batch
    if leaves and hasattr(batch, "leaving_host"):
        batch = batch.leaving_host()
    parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: _each(part, act, leaves) for name, part in parts.items()})
