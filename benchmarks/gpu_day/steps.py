"""Part 5: whole steps of GRPO and PPO: seconds of their parts, and memory."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu_day import machine
from benchmarks.gpu_day.programs import WARM_UP_STEPS, flags_of, made_up_workload, train, trained_by_trl
from benchmarks.gpu_day.record import Report

RUNS = {
    "GRPO, 8 prompts x 4": ("grpo", "Threestep"),
    "PPO, 32 prompts, four models": ("ppo", "Threestep"),
    "PPO, reading apart": ("ppo", "Threestep, reading apart"),
}

# The same steps; weights in 16 bits, which is its fastest. PPO: in releases up to 1.12 alone.
BY_TRL = {
    "GRPO, TRL": ("grpo", ["--samples", "4", "--weights", "bfloat16"]),
    "PPO, TRL": ("ppo", []),
    "PPO, TRL, weights in float32": ("ppo", ["--autocast"]),
}


def measure(report: Report) -> None:
    """One case a run."""
    for name, (competition, competitor) in RUNS.items():
        report.case("seconds of a step", name, lambda c=competition, r=competitor: _step(report, c, r))
    for name, (trainer, flags) in BY_TRL.items():
        report.case("seconds of a step", name, lambda t=trainer, f=flags: _by_trl(report, t, f))


def _by_trl(report: Report, trainer: str, flags: list[str]) -> dict[str, Any]:
    sizes = ["--batch", "32", "--new_tokens", "64"] if report.full else ["--batch", "8", "--new_tokens", "4"]
    rate, peak = trained_by_trl(report, trainer, 8 if report.full else 2, [*sizes, *flags])
    return {"seconds": 1 / rate, "peak, GiB": peak}


def _step(report: Report, competition: str, competitor: str) -> dict[str, Any]:
    """Return the medians of each part's seconds, their sum, and the peak."""
    steps = 8 if report.full else 2
    flags = flags_of(competition, made_up_workload(report), report, steps, competitor)
    if not report.full:
        flags += ["--max_answer_seq_len", "4", "--max_train_rows", "40"]
    run = train(report, "step3_ppo", flags, competitor.replace(" ", "_") + "_" + competition)
    lines = [line for line in run.lines if "time/7_learn" in line]
    parts = parts_of(lines[WARM_UP_STEPS:] or lines)
    return {"seconds": sum(parts.values()), **parts, "peak, GiB": machine.gib(run.peak_bytes)}


def parts_of(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each part of a step; not of what is beside it (evaluation, checkpoints)."""
    names = [name for name in lines[0] if name.startswith("time/")]
    names = [name for name in names if name not in ("time/evaluation", "time/checkpoint", "time/weights_to_vllm")]
    return {name.removeprefix("time/"): statistics.median(line.get(name, 0.0) for line in lines) for name in names}
