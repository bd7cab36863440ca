"""The end of a DeepSpeed engine in a process that continues: nothing of it stays in memory."""

from __future__ import annotations

import gc
from typing import Any

_ZERO3_CLASSES = ("pre_bwd_fn", "post_bwd_fn")


def release(engine: Any) -> None:
    """Release an engine and the weights that it trains; neither can be used afterwards.

    DeepSpeed ties weights, hooks and its wrappers together in circles that pass through autograd's C++ objects, which
    Python's collector does not see: without this a ZeRO run leaves its model, its process groups, their threads and
    sockets to the process (deepspeed 0.19: runtime/utils.py, zero/parameter_offload.py).
    """
    module, weights = engine.module, list(engine.module.parameters())
    wrapper = engine.optimizer
    engine.destroy()
    engine.optimizer = None
    for weight in weights:
        weight.grad = None
        weight.__dict__.clear()
    for part in module.modules():
        for name in _ZERO3_CLASSES:
            part.__dict__.pop(name, None)
        for hooks in (part._forward_pre_hooks, part._forward_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
    offload = getattr(wrapper, "parameter_offload", None)
    if offload is not None:
        offload.__dict__.clear()
        wrapper.__dict__.clear()
    gc.collect()
