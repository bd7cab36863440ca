"""Buffers, such as rotary frequencies, in the precision that their family computes them in, mostly float32.

DeepSpeed 0.19.0 rounds them with the weights when it takes a model (engine.py: _configure_distributed_model); later
versions do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Inside, `module` may be cast; after, each buffer has the dtype and the values that it had, on its new device."""
    were = [
        (owner, name, buffer.detach())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    yield
    for owner, name, was in were:
        now = owner._buffers.get(name)
        if now is not None and now.dtype is not was.dtype:
            owner._buffers[name] = was.to(now.device)
