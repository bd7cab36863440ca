"""Measure this CPU for the clock: matmuls by size, a model's other operators and launches, drawing, AdamW.

In seconds of `in_a_model.now`, with torch's threads; a figure is the median of its tries.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from threestep.plugins.plan.clock.devices import AttentionShares, Device, Links, Measured, Rates, Tiles
from threestep.plugins.plan.dry_run.in_a_model import now, product_flops, product_rate, rates_in_a_model
from threestep.plugins.plan.dry_run.operators import OperatorCount
from training.utils.engine.ranks.devices import backend_of, keep_freed_memory, set_threads
from training.utils.models.document_attention import attention_by_document

# Rows of layers as wide as tall, by their width: from those of a few tokens up to those of a few hundred wide. A step
# has each product three times: forward, and backward for both factors.
_PRODUCTS: dict[int, tuple[int, ...]] = {
    16: (16, 256), 64: (64, 256, 1024), 128: (128, 512, 2048), 256: (256, 1024), 512: (512,), 1024: (512,),
}  # fmt: skip
_TRIES, _LEAST_SECONDS = 5, 0.02
_MOST_SECONDS = 2.0  # of a forward and backward of one size; see `_product_rates`
_TOKENS, _WIDTH, _VOCABULARY = 512, 384, 2048
_HEADS, _HEAD = 4, 64
_LAYERS = 6  # together larger than a cache
_THIN = (1, 4, 16, 64)  # sequences that are drawn
_THIN_LAYERS = (16, 64)  # of 9 MB together, which a cache holds, and of 38, which few do
_CACHES = 8  # sequences whose attention to a cache is measured
_NUMBERS = (1_000_000, 10_000_000)  # that a cache holds with all that belongs to them, and that none does


def measured_cpu(
    dtype: torch.dtype = torch.float32, settings: Mapping[str, Any] = MappingProxyType({}), ranks: int = 1
) -> Device:
    """The rates of this CPU, in a few seconds, for one of `ranks` that share it. settings: of a run, by the flags'
    names, which may choose the library of its products."""
    threads = torch.get_num_threads()
    set_threads(os.environ, ranks)
    try:
        with backend_of(settings, torch.device("cpu")).held():
            return _measured(dtype)
    finally:
        torch.set_num_threads(threads)


def _measured(dtype: torch.dtype) -> Device:
    keep_freed_memory()  # as runs do
    matmuls = _product_rates(dtype)
    thin = tuple(
        (float(layers * _WIDTH**2), tuple((float(rows), _thin_rate(rows, layers, dtype)) for rows in _THIN))
        for layers in _THIN_LAYERS
    )
    optimizer = tuple((float(numbers), _optimizer_rate(numbers)) for numbers in _NUMBERS)
    best = max(rate for _, points in matmuls for _, rate in points) / 1e12
    model = rates_in_a_model(dtype)
    memory = max(rate for points in model.memory for _, rate in points)
    return Device(
        Rates(best, best),
        0.0,
        memory / 1e9,
        AttentionShares(model.attention_forward / best / 1e12, model.attention_backward / best / 1e12),
        Links(memory / 2e9, memory / 2e9, memory / 1e9),
        Tiles(1, 1, 1),
        "measured",
        single=best,
        measured=Measured(matmuls, model.costs, optimizer, _head_rate(), thin, _cache_rate(dtype), model.memory),
    )


def _product_rates(dtype: torch.dtype) -> tuple[tuple[float, tuple[tuple[float, float], ...]], ...]:
    """FLOP/s of products by width and rows. A size that takes long has the rate of the one before it: without
    instructions for bfloat16 (AVX2 alone) its products are 50 times as slow as float32's, whatever their size."""
    rates, rate = [], 0.0
    for width, lengths in _PRODUCTS.items():
        points = []
        for rows in lengths:
            if not rate or product_flops(rows, width) / rate < _MOST_SECONDS:
                rate = product_rate(rows, width, dtype)
            points.append((float(rows), rate))
        rates.append((float(width), tuple(points)))
    return tuple(rates)


def seconds_of(work: Callable[[], object], tries: int = _TRIES, least: float = _LEAST_SECONDS) -> float:
    """Median seconds of a call, each try long enough to be timed."""
    work()
    times, begun = 1, now()
    while True:
        for _ in range(times):
            work()
        spent = now() - begun
        if spent >= least:
            break
        times, begun = 2 * times, now()
    found = []
    for _ in range(tries):
        begun = now()
        for _ in range(times):
            work()
        found.append((now() - begun) / times)
    return statistics.median(found)


def _thin_rate(rows: int, layers: int, dtype: torch.dtype) -> float:
    """FLOP/s of a linear layer's forward on few rows, as a step of drawing has them."""
    states = torch.randn(rows, _WIDTH).to(dtype)
    weights = [torch.randn(_WIDTH, _WIDTH).to(dtype) for _ in range(layers)]

    def products() -> None:
        for weight in weights:
            torch.mm(states, weight.t())

    return 2.0 * len(weights) * rows * _WIDTH**2 / seconds_of(products)


def _cache_rate(dtype: torch.dtype) -> float:
    """Bytes a second of keys and values that one query each reads, in layers of a cache with room."""
    room = (_CACHES, _HEADS, _TOKENS, _HEAD)
    layers = [[torch.randn(room).to(dtype)[:, :, : _TOKENS // 2] for _ in range(2)] for _ in range(_LAYERS)]
    query = torch.randn(_CACHES, _HEADS, 1, _HEAD).to(dtype)

    def read() -> None:
        with torch.no_grad():
            for keys, values in layers:
                attention_by_document(nn.Module(), query, keys, values, None)  # as rollouts do, whatever the precision

    return sum(part.numel() for layer in layers for part in layer) * query.element_size() / seconds_of(read)


def _head_rate() -> float:
    """Bytes a second of log-probabilities of targets and their backward, in float32."""
    logits = torch.randn(_TOKENS, _VOCABULARY, requires_grad=True)
    targets = torch.zeros(_TOKENS, 1, dtype=torch.int64)
    grads = torch.ones(_TOKENS, 1)

    def operators() -> None:
        torch.autograd.grad(logits.log_softmax(-1).gather(1, targets), logits, grads)

    with OperatorCount() as count:
        operators()
    return count.work.moved_bytes / seconds_of(operators)


def _optimizer_rate(numbers: int) -> float:
    """Numbers a second of all that a step does with each: gradients are added up over two micro-steps, averaged in a
    bucket of all, and cleared (deepspeed 0.19, engine.py: allreduce_bucket); their norm, and AdamW."""
    weights = [torch.randn(numbers // 8, requires_grad=True) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)

    def step() -> None:
        grads = [weight.grad for weight in weights if weight.grad is not None]
        for grad in grads:
            grad.add_(1e-3)
        bucket = torch.cat([grad.view(-1) for grad in grads])
        bucket.div_(1.0)
        for grad, part in zip(grads, bucket.chunk(len(grads)), strict=True):
            grad.copy_(part)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        for grad in grads:
            grad.zero_()

    return numbers / seconds_of(step)
