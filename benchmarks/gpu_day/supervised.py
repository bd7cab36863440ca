"""Part 3: tokens a second of SFT beside a bare loop; the reward model and DPO with shared prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu_day import machine
from benchmarks.gpu_day.programs import flags_of, made_up_workload, median_rate, ran, train, trained_by_trl
from benchmarks.gpu_day.record import Report
from training.utils.models.attention import KERNELS

TRL_WEIGHTS = ("float32", "bfloat16")
WANTED_MFU, WANTED_OVER_PEERS, WANTED_OF_RATIO = 0.5, 1.3, 0.85


def measure(report: Report) -> None:
    """SFT and its floor, then pairs."""
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


def _forms(report: Report) -> list[str]:
    """A dense mask, and what this version has beside it on CUDA."""
    return ["sdpa", *(name for name, entry in KERNELS.items() if entry.by_auto)] if report.full else ["sdpa"]


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
