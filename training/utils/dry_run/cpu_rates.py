"""Measure this CPU for the clock: matmuls by size, attention, memory-bound operators, launches, AdamW, gloo.

All in processor seconds of this process with torch's threads, so that others on the machine disturb less; a figure is
the median of its tries.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from training.utils.clock.devices import AttentionShares, Device, HostCosts, Links, Measured, Rates, Tiles
from training.utils.dry_run.operators import OperatorCount
from training.utils.engine.ranks.cpu_products import chosen_products, float32_products
from training.utils.models.attention.document_attention import attention_by_document

# Rows x columns x inner, ascending: of thin layers up to those of a few hundred wide. A step has each three times:
# forward, and backward for both factors.
_PRODUCTS = ((16, 64, 64), (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 256), (1024, 512, 512),
             (1024, 1024, 1024))  # fmt: skip
_TRIES, _LEAST_SECONDS = 5, 0.02
_TOKENS, _WIDTH, _VOCABULARY = 512, 384, 2048
_HEADS, _HEAD = 4, 64
_LAYERS = 6  # together larger than a cache
_THIN = (1, 4, 16, 64)  # sequences that are drawn
_CACHES = 8  # sequences whose attention to a cache is measured
_NUMBERS = 2_000_000


def measured_cpu(dtype: torch.dtype = torch.float32, products: str | None = None) -> Device:
    """The rates of this CPU, in a few seconds. products: as of `chosen_products`."""
    with float32_products(chosen_products(products, torch.device("cpu"))):
        return _measured(dtype)


def _measured(dtype: torch.dtype) -> Device:
    matmuls = tuple((2.0 * prod(shape), _product_rate(shape, dtype)) for shape in _PRODUCTS)
    thin = tuple((float(rows), _thin_rate(rows, dtype)) for rows in _THIN)
    best = max(rate for _, rate in matmuls) / 1e12
    memory = _memory_rate(dtype)
    return Device(
        Rates(best, best),
        0.0,
        memory / 1e9,
        AttentionShares(*(rate / best / 1e12 for rate in _attention_rates(dtype))),
        Links(memory / 2e9, memory / 2e9, memory / 1e9),
        Tiles(1, 1, 1),
        "measured",
        single=best,
        measured=Measured(matmuls, _launch_costs(), _optimizer_rate(), _head_rate(), thin, _cache_rate(dtype)),
    )


def seconds_of(work: Callable[[], object], tries: int = _TRIES, least: float = _LEAST_SECONDS) -> float:
    """Median processor seconds of a call, each try long enough to be timed."""
    work()
    times, begun = 1, time.process_time()
    while True:
        for _ in range(times):
            work()
        spent = time.process_time() - begun
        if spent >= least:
            break
        times, begun = 2 * times, time.process_time()
    found = []
    for _ in range(tries):
        begun = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - begun) / times)
    return statistics.median(found)


def _product_rate(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """FLOP/s of a linear layer's three products together."""
    rows, columns, inner = shape
    sizes = ((rows, inner), (columns, inner), (rows, columns))
    layers = [[torch.randn(*size).to(dtype) for size in sizes] for _ in range(_LAYERS)]

    def products() -> None:
        kept = []
        for states, weight, grads in layers:
            kept += [torch.mm(states, weight.t()), torch.mm(grads, weight), torch.mm(grads.t(), states)]

    return 6.0 * _LAYERS * prod(shape) / seconds_of(products)


def _thin_rate(rows: int, dtype: torch.dtype) -> float:
    """FLOP/s of a linear layer's forward on few rows, as a step of drawing has them."""
    states = torch.randn(rows, _WIDTH).to(dtype)
    weights = [torch.randn(_WIDTH, _WIDTH).to(dtype) for _ in range(4 * _LAYERS)]

    def products() -> None:
        for weight in weights:
            torch.mm(states, weight.t())

    return 2.0 * len(weights) * rows * _WIDTH**2 / seconds_of(products)


def _attention_rates(dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of causal attention, forward and backward, as the clock counts them."""
    parts = [torch.randn(1, _HEADS, _TOKENS, _HEAD).to(dtype).requires_grad_() for _ in range(3)]
    query, key, value = parts
    pairs = _HEADS * _TOKENS * (_TOKENS + 1) / 2
    grads = torch.randn_like(parts[0])

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), parts, grads)

    ahead = seconds_of(forward)
    return 4 * _HEAD * pairs / ahead, 10 * _HEAD * pairs / max(1e-9, seconds_of(both) - ahead)


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


def _memory_rate(dtype: torch.dtype) -> float:
    """Bytes a second of layers' operators besides their products: a norm, a rotation, a gate, and a sum, with their
    backwards, for which layer after layer keeps its tensors."""
    first, other = (torch.randn(1, _TOKENS, _WIDTH).to(dtype).requires_grad_() for _ in range(2))
    scale = torch.ones(_WIDTH, dtype=dtype, requires_grad=True)
    grads = torch.randn(1, _TOKENS, _WIDTH).to(dtype)

    def operators() -> None:
        states = first
        for _ in range(_LAYERS):
            normed = scale * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6))
            turned = normed * grads + torch.cat((-normed[..., _WIDTH // 2 :], normed[..., : _WIDTH // 2]), -1) * grads
            states = silu(turned) * other + states
        torch.autograd.grad(states, (first, other, scale), grads)

    return _bytes_of(operators) / seconds_of(operators)


def _head_rate() -> float:
    """Bytes a second of log-probabilities of targets and their backward, in float32."""
    logits = torch.randn(_TOKENS, _VOCABULARY, requires_grad=True)
    targets = torch.zeros(_TOKENS, 1, dtype=torch.int64)
    grads = torch.ones(_TOKENS, 1)

    def operators() -> None:
        torch.autograd.grad(logits.log_softmax(-1).gather(1, targets), logits, grads)

    return _bytes_of(operators) / seconds_of(operators)


def _bytes_of(work: Callable[[], object]) -> float:
    with OperatorCount() as count:
        work()
    return count.work.moved_bytes


def _launch_costs() -> HostCosts:
    """Seconds of an operator of a layer that has nothing to compute: eight wide, four tokens."""
    from transformers import LlamaConfig, LlamaModel

    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    with torch.random.fork_rng():
        model = LlamaModel(LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, **shape))
    tokens = torch.zeros(1, 4, dtype=torch.int64)

    def forward() -> torch.Tensor:
        states: torch.Tensor = model(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    with OperatorCount() as count:
        states = forward()
        ahead, grads = count.work.launches, torch.ones_like(states)
        states.backward(grads)
        behind = count.work.launches - ahead
    alone = seconds_of(forward)
    both = seconds_of(lambda: forward().backward(grads))
    return HostCosts(alone / ahead, max(0.0, both - alone) / behind)


def _optimizer_rate() -> float:
    """Numbers a second of all that a step does with each: gradients are added up over two micro-steps, averaged in a
    bucket of all, and cleared (deepspeed 0.19, engine.py: allreduce_bucket); their norm, and AdamW."""
    weights = [torch.randn(_NUMBERS // 8, requires_grad=True) for _ in range(8)]
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

    return _NUMBERS / seconds_of(step)
