"""Rates in a model, from seconds that are given."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from threestep.plugins.plan.dry_run import in_a_model
from threestep.plugins.plan.dry_run.in_a_model import KernelSeconds, now, rates_in_a_model
from threestep.plugins.plan.dry_run.operators import ATTENTION, MEMORY_BOUND, PRODUCT, VIEW


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
    """An operator with nothing to compute takes 2 us in itself. Forward 10 of 12 operators are memory-bound, backward
    20 of 22. Their bytes come besides, at 1e9 a second for rows of 64 tokens, twice as many for 256, and three times
    for 768: forward 100,000, 200,000 and 300,000 bytes, backward three times those, so 100 us and 300 at each length.
    The host takes 9, 18 and 27 us an operator forward, and 4, 8 and 12 backward."""

    def forward_or_backward(length, backward):
        bound, own = (20, 300e-6) if backward else (10, 100e-6)
        inside = Counter({MEMORY_BOUND: 2e-6 * bound + own, ATTENTION: 4 * (2e-3 if backward else 1e-3), VIEW: 5e-6})
        calls = Counter({MEMORY_BOUND: bound, PRODUCT: 2})
        host = (4e-6 if backward else 9e-6) * length * (bound + 2)
        seconds = sum(inside.values()) - inside[VIEW] + host
        return in_a_model._Pass(seconds, inside, calls, bound + 2, 1e5 * length * (3 if backward else 1))

    by_length = {
        tokens: [forward_or_backward(place + 1, backward) for backward in (False, True)]
        for place, tokens in enumerate((64, 256, 768))
    }
    empty = [in_a_model._Pass(1.0, Counter({MEMORY_BOUND: 2e-6 * 5}), Counter({MEMORY_BOUND: 5}), 5, 1.0)] * 2

    def in_documents(whole, own, host):
        """In 32 documents of 8 tokens: a kernel takes `own` seconds each time, and the rest of 1 or 2 ms for the pairs
        of 256 tokens, of which 32 * 8 * (9 + 31) / 2 are left of 256 * (257 + 31) / 2; the host `host` seconds more."""
        left = (32 * 8 * (9 + 31) / 2) / (256 * (257 + 31) / 2)
        kernels = Counter(whole.kernels)
        kernels[ATTENTION] = 4 * (32 * own + left * (whole.kernels[ATTENTION] / 4 - own))
        more = 4 * 31 * host + kernels[ATTENTION] - whole.kernels[ATTENTION]
        return whole._replace(seconds=whole.seconds + more, kernels=kernels)

    def passes(model):
        if model._config.hidden_size == 8:
            return empty
        if len(model._cut["runs"]) == 32:
            both = zip(by_length[256], (9e-6, 11e-6), (15e-6, 40e-6), strict=True)
            return [in_documents(*one) for one in both]
        return by_length[model._ids.shape[1]]

    monkeypatch.setattr(in_a_model, "_passes", passes)
    found = rates_in_a_model(torch.float32)
    forward, backward = ([1e5 / 12, 2e5 / 12, 3e5 / 12], [3e5 / 22, 6e5 / 22, 9e5 / 22])
    rates = [1e9, 2e9, 3e9]
    for points, sizes in zip(found.memory, (forward, backward), strict=True):
        assert [size for size, _ in points] == pytest.approx(sizes)
        assert [rate for _, rate in points] == pytest.approx(rates)
    assert [seconds for _, seconds in found.costs.forward] == pytest.approx(
        [(9e-6 * n + 20e-6 / 12) for n in (1, 2, 3)]
    )
    assert [seconds for _, seconds in found.costs.backward] == pytest.approx(
        [(4e-6 * n + 40e-6 / 22) for n in (1, 2, 3)]
    )
    assert [size for size, _ in found.costs.backward] == pytest.approx(backward)
    assert found.costs.document == pytest.approx((9e-6 + 15e-6, 11e-6 + 40e-6))
    flops = 4 * 64 * 256 * (256 + 32) / 2  # of a product forward in a layer: heads, head size, pairs
    assert found.attention_forward == pytest.approx(4 * flops / (1e-3 - 9e-6))
    assert found.attention_backward == pytest.approx(10 * flops / (2e-3 - 11e-6))


def test_the_model_that_is_measured_is_as_runs_have_it():
    """Its attention is by document, and its norms and MLPs keep less, in the count on meta too."""
    model = in_a_model._Llama(64, 1, 8, torch.float32, documents=2)
    kept = [part for part in model._model.modules() if "forward" in vars(part)]
    assert len(kept) == 4 * 3 + 1  # two norms and an MLP in a layer, and the last norm
    with KernelSeconds() as inside:
        model.forward()
    assert inside.calls[ATTENTION] == 2 * 4
    assert model.counted().forward.launches == in_a_model._Llama(64, 1, 8, torch.float32).counted().forward.launches


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
