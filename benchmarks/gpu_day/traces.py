"""Where the device's time goes in a call, from torch's trace of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_day import machine
from benchmarks.gpu_day.record import NotHere


def traced(path: Path, call: Callable[[], Any]) -> dict[str, Any]:
    """Return where the device's time goes in a call; of the device's events alone, a trace is read in a second."""
    on_cuda = machine.device().type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        call()
        machine.wait()
    profile.export_chrome_trace(str(path))
    events, kind = json.loads(path.read_text())["traceEvents"], "kernel" if on_cuda else "cpu_op"
    count = sum(event.get("cat") == kind for event in events)
    return {"kernels": count, **times_of(events, kind), "raw": longest_kernels(events, kind)}


def longest_kernels(events: Iterable[Mapping[str, Any]], kind: str, most: int = 60) -> dict[str, list[float]]:
    """Return the names with the most milliseconds, and how often each ran."""
    found: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == kind and "dur" in event:
            milliseconds, times = found.get(event["name"][:160], [0.0, 0])
            found[event["name"][:160]] = [milliseconds + event["dur"] / 1000, times + 1]
    return dict(sorted(found.items(), key=lambda pair: -pair[1][0])[:most])


def times_of(events: Iterable[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Return the share of the span of a trace in which the device works, its gaps, and its shares by kind of kernel.
    They add up to 1. Events that lie in others are not counted twice."""
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") == kind and "dur" in event]
    timed = sorted(timed, key=lambda event: (event["ts"], -event["dur"]))
    if not timed:
        raise NotHere(f"the trace holds no event of the kind '{kind}'")
    begin, reached, gaps, parts = timed[0]["ts"], timed[0]["ts"], list[float](), dict[str, float]()
    for event in timed:
        end = event["ts"] + event["dur"]
        if event["ts"] > reached:
            gaps.append(event["ts"] - reached)
        own = end - max(reached, event["ts"])
        if own > 0:
            part = _part_of(event["name"])
            parts[part] = parts.get(part, 0.0) + own
            reached = end
    span = reached - begin
    shares = {part: took / span for part, took in sorted(parts.items(), key=lambda pair: -pair[1])}
    idle, longest = sum(gaps) / span, max(gaps, default=0.0)
    return {"span, ms": span / 1000, "idle": idle, "longest gap, ms": longest / 1000, **shares}


def _part_of(name: str) -> str:
    """Say what a kernel is for, by its name."""
    lower = name.lower()
    kinds = {
        "attention": ("flash", "fmha", "attention", "attn"),
        "matrix products": ("gemm", "nvjet", "cutlass", "::mm", "addmm", "matmul", "linear", "bmm"),
        "optimizer": ("adam", "multi_tensor", "lamb"),
        "copies": ("memcpy", "memset", "copy", "::to", "cat"),
        "collectives": ("nccl", "all_reduce", "allreduce"),
    }
    return next(
        (kind for kind, words in kinds.items() if any(word in lower for word in words)), "elementwise and others"
    )
