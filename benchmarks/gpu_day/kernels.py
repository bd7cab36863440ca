"""Part 9: one model in one process, its operations as they are, keeping less, fused and compiled: seconds and memory of
a training step and of a rollout, where the device's time goes, and how far the numbers are apart.

A program takes most of a minute to start, load and save; here a way takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu_day import machine
from benchmarks.gpu_day.attention import VARLEN, give, in_rows
from benchmarks.gpu_day.decoding import checked_rollout, request_of
from benchmarks.gpu_day.models import SHAPES, random_model, sequence
from benchmarks.gpu_day.record import NotHere, Report
from benchmarks.gpu_day.traces import traced
from threestep.plugins.captured.steps import FixedSteps
from threestep.plugins.speed.compiled import compile_blocks
from threestep.plugins.speed.fused.operations import fuse, keep_less_fused, liger_kernels, unfuse
from threestep.plugins.speed.lean.forwards import keep_less
from training.utils.contracts.documents import plain
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.ranks.startup import started_process_group
from training.utils.engine.training_engine import TrainingEngine
from training.utils.layout.rows import packed_rows
from training.utils.models.own_forward import read_own_forward
from training.utils.models.settings import keep_all
from training.utils.models.token_model import PolicyModel

Way = Callable[[Any], contextlib.AbstractContextManager[None]]
STEPS, WARM_UP_STEPS = 8, 3


@contextlib.contextmanager
def _lean(model: Any) -> Iterator[None]:
    keep_less(model)
    try:
        yield
    finally:
        keep_all(model.modules())


@contextlib.contextmanager
def _fused(model: Any) -> Iterator[None]:
    try:
        kernels = liger_kernels()
    except ImportError as problem:
        raise NotHere(f"liger-kernel cannot be imported: {problem}") from problem
    parts = fuse(model, kernels)
    keep_less_fused(model)
    try:
        yield
    finally:
        unfuse(parts)


@contextlib.contextmanager
def _compiled(model: Any) -> Iterator[None]:
    compile_blocks(model)
    try:
        yield
    finally:
        for part in model.modules():
            if getattr(part, "_compiled_call_impl", None) is not None:
                part._compiled_call_impl = None


PLAIN, LEAN, FUSED = "as the family writes them", "keeping less", "Liger's kernels"
WAYS: dict[str, Way] = {
    PLAIN: lambda model: contextlib.nullcontext(),
    LEAN: _lean,
    FUSED: _fused,
    "compiled blocks": _compiled,
}


def measure(report: Report) -> None:
    """Training steps, their profiles, then rollouts."""
    with started_process_group() as ranks:
        bench = functools.cache(lambda: Bench.made(report, ranks))
        for name, way in WAYS.items():
            report.case("a training step", name, lambda w=way: bench().steps(w))
        for name in (LEAN, FUSED):
            report.case("where a step's time goes", name, lambda n=name: _profiled(report, bench(), WAYS[n]))
        for batch in (32, 128) if report.full else (3,):
            for name in (PLAIN, FUSED):
                report.case(
                    f"a rollout of {batch} rows", name, lambda b=batch, n=name: _rollout(report, bench(), WAYS[n], b)
                )


@dataclass
class Bench:
    """A random model in its engine, with rows of texts. read: log-probabilities [M] of the first way."""

    model: Any
    engine: TrainingEngine
    rows: Any
    tokens: int
    read: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def made(cls, report: Report, ranks: Any) -> Bench:
        shape, dtype = ("1300m", "bf16") if report.full else ("tiny", "fp32")
        lengths = [67 + 37 * text % 211 for text in range(48)] if report.full else [20, 30, 10]
        model = random_model(shape, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], machine.device())
        read_own_forward(model, 0)
        if machine.device().type == "cuda":
            give(model, VARLEN)
        texts = [plain(sequence(length, SHAPES[shape][-1], seed)) for seed, length in enumerate(lengths)]
        rows = packed_rows(in_rows(texts, 2048 if report.full else 64), 0).to(machine.device())
        # No rate, so that every way reads the same weights.
        settings = EngineSettings(dtype=dtype, zero_stage=1, learning_rate=0.0)
        engine = TrainingEngine(PolicyModel(model), settings, ranks, 1000)
        engine.train()
        return cls(model, engine, rows, sum(lengths))

    def step(self) -> tuple[float, float, torch.Tensor]:
        """Return seconds of forward and backward, and of the update; log-probabilities."""
        machine.wait()
        begun = time.perf_counter()
        logprobs_M = self.engine(self.rows).logprobs_M
        self.engine.backward(-logprobs_M.mean())
        machine.wait()
        learned = time.perf_counter()
        self.engine.step()
        machine.wait()
        return learned - begun, time.perf_counter() - learned, logprobs_M.detach().float()

    def steps(self, way: Way) -> dict[str, Any]:
        """Return medians, the peak, and how far the log-probabilities are from the first way's."""
        with way(self.model):
            begun = time.perf_counter()
            self.step()
            first = time.perf_counter() - begun
            runs, peak = machine.with_peak(lambda: [self.step() for _ in range(STEPS)][WARM_UP_STEPS:])
        read_M = runs[-1][2]
        self.read = self.read or [read_M]
        apart_M = (read_M - self.read[0]).abs()
        learning, update = (statistics.median(run[part] for run in runs) for part in (0, 1))
        return {
            "tokens/s": self.tokens / (learning + update),
            "forward and backward, s": learning,
            "update, s": update,
            "first step, s": first,
            "peak, GiB": machine.gib(peak),
            "nats apart, largest": float(apart_M.max()),
            "mean": float(apart_M.mean()),
        }


def _profiled(report: Report, bench: Bench, way: Way) -> dict[str, Any]:
    with way(bench.model):
        bench.step()
        return traced(report.place / "trace.json", bench.step)


def _rollout(report: Report, bench: Bench, way: Way, batch: int) -> dict[str, Any]:
    """Return seconds of a rollout, of the graphs that it captures, and where the device's time goes in another."""
    prompt, new, vocabulary = (110, 64, SHAPES["1300m"][-1]) if report.full else (6, 8, SHAPES["tiny"][-1])
    request = request_of(batch, prompt, new, vocabulary)
    bench.model.zero_grad(set_to_none=True)
    with way(bench.model), torch.no_grad():
        engine = checked_rollout(bench.model)
        engine.roll_out(bench.model, request)
        seconds = machine.median_seconds(lambda: engine.roll_out(bench.model, request), repeats=3, warm_up=0)
        with _timed_captures() as captures:
            engine.roll_out(bench.model, request)
        profile = traced(report.place / "trace.json", lambda: engine.roll_out(bench.model, request))
    figures = {"tokens/s": batch * new / seconds, "seconds": seconds, "ms a token": 1000 * seconds / new}
    return {**figures, "captures": len(captures), "seconds of them": sum(captures), **profile}


@contextlib.contextmanager
def _timed_captures() -> Iterator[list[float]]:
    """Inside, note the seconds of each capture."""
    plain, seconds = FixedSteps.capture, list[float]()

    def capture(steps: FixedSteps) -> None:
        machine.wait()
        begun = time.perf_counter()
        plain(steps)
        machine.wait()
        seconds.append(time.perf_counter() - begun)

    FixedSteps.capture = capture  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        FixedSteps.capture = plain  # type: ignore[method-assign]
