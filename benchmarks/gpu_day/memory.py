"""Part 6: what --dry_run estimates beside what torch held; chunks of the head; an out-of-memory that is provoked."""

from __future__ import annotations

import re
from typing import Any

import torch

from benchmarks.gpu_day import machine
from benchmarks.gpu_day.models import config_of
from benchmarks.gpu_day.programs import NO_TRACKERS, ran, training_case
from benchmarks.gpu_day.record import NotHere, Report
from training.utils.base.errors import ThreestepError
from training.utils.models.token_model import TargetHead

# Flags that the training case and the programs share.
SETTINGS: dict[str, list[str]] = {
    "ZeRO 0": [],
    "ZeRO 2": ["--zero_stage", "2"],
    "ZeRO 3": ["--zero_stage", "3"],
    "ZeRO 0, recomputation": ["--gradient_checkpointing"],
    "ZeRO 0, LoRA": ["--lora_dim", "16"],
    "ZeRO 2, offload": ["--zero_stage", "2", "--offload"],
    "ZeRO 3, offload": ["--zero_stage", "3", "--offload"],
}
ROOM_MB = 64


def measure(report: Report) -> None:
    """Settings one by one, then the head, then the provoked end."""
    shape, rows, tokens = ("1300m", 4, 2048) if report.full else ("tiny", 2, 64)
    for name, flags in SETTINGS.items():
        report.case(
            f"{shape}, {rows} rows of {tokens:,} tokens",
            name,
            lambda f=flags: _beside_estimate(report, shape, rows, tokens, f),
        )
    kinds = (
        ((2**28, "256 MB"), (2**30, "1 GB"), (2**31, "2 GB")) if report.full else ((2**14, "16 kB"), (2**20, "1 MB"))
    )
    read: dict[str, torch.Tensor] = {}
    for chunk_bytes, name in kinds:
        report.case("chunks of the head", name, lambda b=chunk_bytes: _head(report, b, read))
    report.case("out of memory, provoked", "a forward with too many rows", lambda: _provoked(report))


def _beside_estimate(report: Report, shape: str, rows: int, tokens: int, flags: list[str]) -> dict[str, Any]:
    """Return what was estimated, what torch held at most in a step, and how much the estimate is of it."""
    estimate = estimated_gib(report, shape, rows, tokens, flags)
    sizes = ["--rows", str(rows), "--tokens", str(tokens)]
    figures: dict[str, Any] = {"estimate, GiB": estimate}
    if machine.device().type == "cpu":
        return {**figures, "held, GiB": None, "note": "no GPU: the estimate alone"}
    lines = training_case(report, ["--shape", shape, *sizes, "--steps", "3", *flags])
    held = machine.gib(max(line["peak_bytes"] for line in lines))
    return {**figures, "held, GiB": held, "estimate / held": estimate / held}


def estimated_gib(report: Report, shape: str, rows: int, tokens: int, flags: list[str]) -> float:
    """Return the most at once on a GPU, by --dry_run of step 1."""
    folder = report.place / f"config_{shape}"
    config_of(shape).save_pretrained(folder)
    words = ["-m", "training.step1_sft.main", "--model_name_or_path", str(folder), "--data_path", "embedded"]
    words += ["--dry_run", "true", "--device", "cuda", "--padded", *NO_TRACKERS]
    words += ["--attn_implementation", "sdpa", *flags]
    words += ["--per_device_train_batch_size", str(rows), "--max_seq_len", str(tokens), "--dtype", "bf16"]
    return most_at_once(ran(report, words))


def most_at_once(said: str) -> float:
    """Return GiB on the device in the last line of --dry_run's table."""
    found = re.findall(r"^ *most at once.*?([\d,.]+) +(?:[\d,.]+|-)$", said, re.MULTILINE)
    if not found:
        raise ThreestepError("--dry_run printed no line 'most at once'")
    return float(found[-1].replace(",", ""))


def _head(report: Report, chunk_bytes: int, read: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return seconds and memory of the head's forward and backward, and that it gives the same numbers."""
    hidden, vocabulary, tokens = (2048, 128256, 8192) if report.full else (32, 300, 64)
    dtype, device = (torch.bfloat16 if report.full else torch.float32), machine.device()
    generator = torch.Generator(device).manual_seed(0)
    layer = torch.nn.Linear(hidden, vocabulary, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        layer.weight.normal_(0.0, 0.02, generator=generator)
    head = TargetHead(layer, chunk_bytes)
    hidden_MH = torch.randn(tokens, hidden, device=device, dtype=dtype, generator=generator).requires_grad_()
    target_ids_M = torch.randint(vocabulary, (tokens,), device=device, generator=generator)

    def once() -> torch.Tensor:
        layer.weight.grad = hidden_MH.grad = None
        logprobs_M = head(hidden_MH, target_ids_M).logprobs_M
        logprobs_M.sum().backward()
        return logprobs_M.detach()

    logprobs_M, peak = machine.with_peak(once)
    first = read.setdefault("first", logprobs_M)
    return {
        "chunks": -(-tokens // max(1, chunk_bytes // (4 * vocabulary))),
        "seconds": machine.median_seconds(once),
        "peak, GiB": machine.gib(peak),
        "apart from the first": float((logprobs_M - first).abs().max()),
    }


def _provoked(report: Report) -> dict[str, Any]:
    """Return how a run ends whose forward has no room: by one sentence, with the code of a mistake."""
    sizes = (
        ["--shape", "1300m", "--rows", "16", "--tokens", "2048"]
        if report.full
        else ["--rows", "256", "--tokens", "256"]
    )
    words = ["-m", "benchmarks.gpu_day.training_case", *sizes, "--room_mb", str(ROOM_MB)]
    done = report.run(words, {})
    said = [line for line in done.stderr.splitlines() if line.startswith("error: out of memory")]
    if done.returncode == 0:
        raise NotHere(f"{ROOM_MB} MB were enough: nothing was provoked")
    return {
        "code": done.returncode,
        "sentences": len(said),
        "traceback": "yes" if "Traceback" in done.stderr else "no",
        "names the rows": "yes" if said and " rows of " in said[0] else "no",
        "raw": said or done.stderr[-2000:],
    }
