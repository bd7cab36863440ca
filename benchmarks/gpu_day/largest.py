"""Part 7: 8, 14 and 32 billion weights trained with LoRA, in full and with offload; memory that does not grow."""

from __future__ import annotations

import math
import os
import statistics
from typing import Any

from benchmarks.gpu_day import machine
from benchmarks.gpu_day.models import SHAPES
from benchmarks.gpu_day.programs import training_case
from benchmarks.gpu_day.record import NotHere, Report

HOW = {
    "LoRA": ["--lora_dim", "64", "--gradient_checkpointing"],
    "full": ["--gradient_checkpointing"],
    "full, offload": ["--zero_stage", "2", "--offload", "--gradient_checkpointing"],
}
# float32 master weights and two moments, and the gradient that is stepped with.
HOST_BYTES_A_WEIGHT = 16
WARM_UP_STEPS = 5


def measure(report: Report) -> None:
    """LoRA from the smallest up, then every weight."""
    shapes, tokens = (("8b", "14b", "32b"), 4096) if report.full else (("tiny",), 64)
    for how, flags in HOW.items():
        for shape in shapes:
            # A step of an optimizer on the host takes seconds.
            steps = (10 if "offload" in how else 50) if report.full else 7
            report.case(
                f"SFT at {tokens:,} tokens a step",
                f"{shape}, {how}, {steps} steps",
                lambda s=shape, f=flags, n=steps: _trained(report, s, f, tokens, n),
            )


def weights_of(shape: str) -> int:
    """Return how many weights a shape has, with embeddings and head."""
    hidden, layers, heads, shared, intermediate, vocabulary = SHAPES[shape]
    attention = 2 * hidden * hidden * (1 + shared / heads)
    return int(layers * (attention + 3 * hidden * intermediate + 2 * hidden) + 2 * vocabulary * hidden + hidden)


def _trained(report: Report, shape: str, flags: list[str], tokens: int, steps: int) -> dict[str, Any]:
    needed, there = HOST_BYTES_A_WEIGHT * weights_of(shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if "--offload" in flags and needed > 0.8 * there:  # the system would end more than this program
        raise NotHere(
            f"its optimizer needs {machine.gib(needed):.0f} GiB on the host, which has {machine.gib(there):.0f}"
        )
    lines = training_case(report, ["--shape", shape, "--tokens", str(tokens), "--steps", str(steps), *flags])
    return summary(lines, weights_of(shape))


def summary(lines: list[dict[str, Any]], weights: int) -> dict[str, Any]:
    """Return speed, memory, and how much more is held after the last step than after the first that are warm."""
    steady = lines[WARM_UP_STEPS:] or lines
    grown = steady[-1]["bytes_after"] - steady[0]["bytes_after"]
    seconds = statistics.median(line["seconds"] for line in steady)
    return {
        "weights": f"{weights / 1e9:.2f} billion",
        "steps": len(lines),
        "seconds a step": seconds,
        "tokens/s": steady[0]["tokens"] / seconds,
        "peak, GiB": machine.gib(max(line["peak_bytes"] for line in lines)),
        "grown, MiB": grown / 2**20,
        "losses": "finite" if all(math.isfinite(line["loss"]) for line in lines) else "NOT FINITE",
    }
