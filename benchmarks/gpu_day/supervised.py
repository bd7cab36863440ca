"""Part 3: tokens a second of SFT beside a bare loop; the reward model and DPO with shared prompts; where time goes."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from benchmarks.gpu_day import machine
from benchmarks.gpu_day.programs import flags_of, made_up_workload, median_rate, ran, train, trained_by_trl
from benchmarks.gpu_day.record import NotHere, Report
from training.utils.models.attention.attention import IMPLEMENTATIONS

TRL_WEIGHTS = ("float32", "bfloat16")
WANTED_MFU, WANTED_OVER_PEERS, WANTED_OF_RATIO = 0.5, 1.3, 0.85


def measure(report: Report) -> None:
    """SFT and its floor, then pairs, then the profile."""
    steps, sequences = (16, 48) if report.full else (4, 4)
    rates: dict[str, float] = {}
    group = "SFT, tokens a second"
    report.case(group, "matrix products in bfloat16", lambda: {"TFLOP/s": machine.matmul_rate(torch.bfloat16) / 1e12})
    for attention in _forms(report):

        def sft(attention: str = attention) -> dict[str, Any]:
            flags = [*flags_of("sft", made_up_workload(report), report, steps), *_batch(sequences)]
            flags += ["--attn_implementation", attention]
            run = train(report, "step1_sft", flags, f"sft_{attention}")
            rates[f"sft {attention}"] = run.steady("train/tokens_per_second")
            mfu = run.steady("train/mfu")
            return {
                "tokens/s": rates[f"sft {attention}"],
                "share of the matmul rate": mfu,
                f"wanted, {WANTED_MFU:g}": "reached" if mfu >= WANTED_MFU else "not reached",
                "peak, GiB": machine.gib(run.peak_bytes),
            }

        report.case(group, f"Threestep, {attention}", sft)
    for head in ("targets", "all"):
        report.case(group, f"bare loop, logits of {head}", lambda h=head: _floor(report, h, steps, rates))
    for name, flags in _trl_ways(sequences).items():
        report.case(group, f"TRL, grouped, {name}", lambda f=flags: _trl(report, steps, rates, f))
    for name in ("reward", "dpo"):
        report.case("shared prompts, pairs a second", name, lambda n=name: _pairs(report, n, steps, sequences // 2))
    report.case("where the time goes", "an SFT step", lambda: _profile(report, sequences))


def _forms(report: Report) -> list[str]:
    """A dense mask, and what this version has beside it on CUDA."""
    return (
        [form for form in ("varlen", "sdpa", "flex_attention") if form in IMPLEMENTATIONS] if report.full else ["sdpa"]
    )


def _trl_ways(sequences: int) -> dict[str, list[str]]:
    """All sequences in one forward, and in three; weights in float32 under autocast, or in 16 bits."""
    ways = {f"weights in {weights}": ["--weights", weights, "--batch", str(sequences)] for weights in TRL_WEIGHTS}
    parts = ["--weights", TRL_WEIGHTS[-1], "--batch", str(sequences // 3), "--accumulate", "3"]
    if machine.version("liger-kernel") is not None:
        fused = f"weights in {TRL_WEIGHTS[-1]}, Liger's kernels"
        ways[fused] = [*ways[f"weights in {TRL_WEIGHTS[-1]}"], "--liger"]
    return {**ways, f"weights in {TRL_WEIGHTS[-1]}, in three forwards": parts}


def _batch(sequences: int) -> list[str]:
    return ["--per_device_train_batch_size", str(sequences), "--gradient_accumulation_steps", "1"]


def _floor(report: Report, head: str, steps: int, rates: dict[str, float]) -> dict[str, Any]:
    workload = made_up_workload(report)
    rows, width = (4, 2048) if report.full else (2, 64)
    words = ["-m", "benchmarks.competitors.floor_sft", "--workload", str(workload.folder), "--dtype", "bf16"]
    words += ["--steps", str(steps), "--head", head, "--rows", str(rows), "--width", str(width)]
    return _beside(median_rate(ran(report, words)), rates)


def _trl(report: Report, steps: int, rates: dict[str, float], flags: list[str]) -> dict[str, Any]:
    rate, peak = trained_by_trl(report, "sft", steps, ["--mode", "grouped", *flags])
    return {**_beside(rate, rates), "peak, GiB": peak}


def _beside(rate: float, rates: Mapping[str, float]) -> dict[str, Any]:
    """Return a peer's rate, and how many times that ours is, by its best form of attention."""
    ours = max((value for name, value in rates.items() if name.startswith("sft")), default=None)
    return {"tokens/s": rate, "Threestep, times": None if ours is None else ours / rate}


def _pairs(report: Report, name: str, steps: int, pairs: int) -> dict[str, Any]:
    """Return pairs a second with shared prompts and padded, beside what the tokens allow."""
    workload, module = made_up_workload(report), {"reward": "step2_reward", "dpo": "step2_dpo"}[name]
    found, peak = {}, math.inf
    for layout in ("shared", "padded"):
        flags = [*flags_of(name, workload, report, steps), "--per_device_train_batch_size", str(pairs)]
        flags += ["--padded"] * (layout == "padded")
        if name == "dpo":
            flags += ["--max_train_rows", str(pairs * steps)]
        run = train(report, module, flags, f"{name}_{layout}")
        found[layout], peak = run.steady("train/pairs_per_second"), min(peak, machine.gib(run.peak_bytes))
    peers = {}
    if machine.version("trl") is not None:
        flags = ["--pairs", "pairs.jsonl", "--batch", str(pairs), "--weights", TRL_WEIGHTS[-1]]
        peers["pairs/s, TRL"], peers["TRL's peak, GiB"] = trained_by_trl(report, name, steps, flags)
    shared, unshared = workload.tokens("pairs.jsonl")
    gain, ratio = found["shared"] / found["padded"], unshared / shared
    return {
        **{f"pairs/s, {layout}": value for layout, value in found.items()},
        "peak, GiB": peak,
        **peers,
        "gain": gain,
        "ratio of tokens": ratio,
        "share of it": gain / ratio,
        f"wanted, {WANTED_OF_RATIO:g}": "reached" if gain / ratio >= WANTED_OF_RATIO else "not reached",
    }


def _profile(report: Report, sequences: int) -> dict[str, Any]:
    """Return where the device's time of one step goes, from torch's trace of it."""
    step = 5 if report.full else 2
    flags = [*flags_of("sft", made_up_workload(report), report, step), *_batch(sequences), "--profile_steps", str(step)]
    train(report, "step1_sft", flags, "profiled")
    path = report.place / "profiled" / "profile" / f"step{step}_rank0.pt.trace.json.gz"
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    kind = "kernel" if machine.device().type == "cuda" else "cpu_op"
    return {**times_of(events, kind), "raw": longest(events, kind)}


def longest(events: Iterable[Mapping[str, Any]], kind: str, most: int = 60) -> dict[str, list[float]]:
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
