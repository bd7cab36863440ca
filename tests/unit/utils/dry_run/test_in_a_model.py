"""Rates in a model, from seconds that are given."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from training.utils.clock.devices import HostCosts
from training.utils.dry_run import in_a_model
from training.utils.dry_run.in_a_model import KernelSeconds, now, rates_in_a_model
from training.utils.dry_run.operators import ATTENTION, MEMORY_BOUND, PRODUCT, VIEW


def test_operators_are_told_apart():
    """Two products and two sums; a turn of the factor is a view, and what makes room is none of a kernel's work."""
    left, right = torch.randn(4, 8), torch.randn(8, 4)
    query = torch.randn(1, 2, 8, 4)
    with KernelSeconds() as inside:
        (left @ right + left @ left.t()).sum()
        torch.empty(3)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert inside.calls[PRODUCT] == 2 and inside.calls[MEMORY_BOUND] == 2 and inside.calls[ATTENTION] == 1
    assert inside.calls[VIEW] >= 2 and all(seconds >= 0 for seconds in inside.seconds.values())


def test_backwards_are_seen_too():
    left = torch.randn(4, 8, requires_grad=True)
    loss = (left @ torch.randn(8, 4)).sum()
    with KernelSeconds() as inside:
        loss.backward()
    assert inside.calls[PRODUCT] == 1


def test_rates_are_read_from_what_each_part_takes(monkeypatch):
    """An operator with nothing to compute takes 2 us in itself and 8 us of the host forward, 3 backward. In a layer its
    bytes come besides, at 1e9 a second: forward 10 operators of 100,000 bytes together take 120 us, backward 20 of
    300,000 take 340; of the host 9 and 4 us each. Attention computes 4 layers of 4 heads of 256 tokens, with blocks of
    32 queries, forward in 1 ms and backward in 2."""
    kernels = [Counter({MEMORY_BOUND: 120e-6, ATTENTION: 1e-3, PRODUCT: 3e-3, VIEW: 5e-6})]
    kernels += [Counter({MEMORY_BOUND: 340e-6, ATTENTION: 2e-3, PRODUCT: 6e-3})]
    calls = [Counter({MEMORY_BOUND: 10, PRODUCT: 1, ATTENTION: 1}), Counter({MEMORY_BOUND: 20, PRODUCT: 2})]
    host = (9e-6 * 12, 4e-6 * 22)
    wide = [
        in_a_model._Pass(sum(inside.values()) - inside[VIEW] + rest, inside, count, launched, moved)
        for inside, rest, count, launched, moved in zip(kernels, host, calls, (12, 22), (1e5, 3e5), strict=True)
    ]
    empty = [in_a_model._Pass(1.0, Counter({MEMORY_BOUND: 2e-6 * 5}), Counter({MEMORY_BOUND: 5}), 5, 1.0)] * 2
    # In 32 documents: 31 more in each of 4 layers, which take the host 15 us each forward and 40 backward.
    cut = [one._replace(seconds=one.seconds + 4 * 31 * more) for one, more in zip(wide, (15e-6, 40e-6), strict=True)]

    def passes(model):
        return empty if model._model.config.hidden_size == 8 else cut if model._cut else wide

    monkeypatch.setattr(in_a_model, "_passes", passes)
    found = rates_in_a_model(torch.float32)
    assert found.memory == pytest.approx(1e9)
    documents = pytest.approx((15e-6, 40e-6))
    assert found.costs == HostCosts(pytest.approx(11e-6), pytest.approx(6e-6), document=documents)
    flops = 4 * 4 * 64 * 256 * (256 + 32) / 2  # of a product forward: layers, heads, head size, pairs
    assert found.attention_forward == pytest.approx(4 * flops / 1e-3)
    assert found.attention_backward == pytest.approx(10 * flops / 2e-3)


def test_products_rates_are_of_the_passes_of_square_layers(monkeypatch):
    """2 layers of 7 products of 64 rows of 8 x 8, three times each, in 2 and 4 ms."""

    def inside(model):
        weights = {tuple(part.shape) for part in model._model.layers.parameters() if part.dim() == 2}
        assert weights == {(8, 8)} and len(model._model.layers) == 2
        found = KernelSeconds(), KernelSeconds()
        for one, seconds in zip(found, (2e-3, 4e-3), strict=True):
            one.seconds[PRODUCT] = seconds
        return found

    monkeypatch.setattr(in_a_model, "_inside", inside)
    assert in_a_model.product_rate(64, 8, torch.float32) == pytest.approx(3 * 14 * 2 * 64 * 64 / 6e-3)


def test_a_model_is_measured():
    """Of 4 layers on 4 tokens: products, attention, and seconds outside of operators."""
    ahead, behind = in_a_model._passes(in_a_model._Llama(8, 2, 4, torch.float32))
    assert ahead.calls[PRODUCT] == 4 * 7 and behind.calls[PRODUCT] == 2 * 4 * 7
    assert ahead.calls[ATTENTION] == behind.calls[ATTENTION] == 4
    for one in (ahead, behind):
        assert one.launched > 4 * 7 and one.moved > 0 and 0 < sum(one.kernels.values()) and one.seconds > 0


def test_several_threads_are_timed_by_the_clock_on_the_wall(monkeypatch):
    monkeypatch.setattr(in_a_model.time, "process_time", lambda: 1.0)
    monkeypatch.setattr(in_a_model.time, "perf_counter", lambda: 2.0)
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(now())
    assert found == [1.0, 2.0]
