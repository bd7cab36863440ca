"""Weights that DeepSpeed's ZeRO-3 has made whole, or is making whole, on this rank. Other stages have none."""

from __future__ import annotations

from typing import Any


def release_gathered(engine: Any) -> None:
    """Wait until the weights of a DeepSpeed engine that are under way have arrived, and shard whole ones again.

    DeepSpeed gathers in the order of the last training step, ahead of use. A forward without gradients ends where that
    step began its backward, so that it leaves weights under way that nobody waits for (deepspeed 0.19,
    partitioned_param_coordinator.py: `reset_step` does, in the next forward), and others whole for that backward.
    Whoever gathers them meanwhile fails at the end ("Cannot partition a param in flight"), and later work has less
    memory. Not a collective: it waits for those that every rank has begun.
    """
    under_way = getattr(engine.module, "ds_inflight_param_registry", None)
    if under_way is None:
        return
    for handle in list(under_way.values()):
        handle.wait()
    under_way.clear()
    whole = [weight for weight in engine.module.parameters() if weight.ds_status.name == "AVAILABLE"]
    whole = [weight for weight in whole if not weight.ds_persist]  # too small to be sharded: never released
    if whole:
        whole[0].partition(param_list=whole)
