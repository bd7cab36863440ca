"""Operators counted on the meta device, by hand and beside `models.flops`; rates in a model, from given seconds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from threestep.plugins.plan.clock.work import Matmul
from threestep.plugins.plan.dry_run import in_a_model, operators
from threestep.plugins.plan.dry_run.in_a_model import KernelSeconds, now, rates_in_a_model
from threestep.plugins.plan.dry_run.operators import ATTENTION, MEMORY_BOUND, PRODUCT, VIEW, training_work
from training.utils.models.flops import model_shape, training_flops

ROWS, TOKENS, TARGETS = 2, 16, 7
SHAPE = dict(hidden_size=32, num_hidden_layers=5, num_attention_heads=4, vocab_size=64, max_position_embeddings=64)
FAMILIES = {
    "llama": dict(intermediate_size=48, num_key_value_heads=2),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.0),
    "gpt_neox": dict(intermediate_size=128),
}


def on_meta(family: str, dtype: torch.dtype = torch.float32, **more) -> torch.nn.Module:
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES.get(family, {}), **more})
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


@pytest.mark.parametrize("family", FAMILIES)
def test_matmuls_are_those_of_the_formula(family):
    model = on_meta(family)
    work = training_work(model, ROWS, TOKENS, TARGETS)
    counted = sum(part.matmul_flops for part in work)
    assert counted == training_flops(model_shape(model), ROWS * TOKENS, 0, TARGETS)


def test_attention_sees_what_is_before_it_and_a_cpus_blocks_what_is_masked_too():
    """5 layers of width 32: 4 FLOPs forward and 10 backward, for each of 16 x 17 / 2 pairs of two rows. 64 tokens in
    blocks of 32: the first sees 32 keys and the second 64, 3,072 pairs of which 64 x 65 / 2 count."""
    work = training_work(on_meta("llama"), ROWS, TOKENS, TARGETS)
    pairs = ROWS * TOKENS * (TOKENS + 1) / 2
    assert work.forward.attention_flops == 5 * 4 * 32 * pairs
    assert work.backward.attention_flops == 5 * 10 * 32 * pairs
    pairs = ROWS * (32 * 32 + 32 * 64 - 64 * 65 / 2)
    work = training_work(on_meta("llama"), ROWS, 64, TARGETS)
    assert (work.forward.apart_flops, work.backward.apart_flops) == (5 * 4 * 32 * pairs, 5 * 10 * 32 * pairs)


def test_attention_document_by_document_has_more_calls_and_tensors():
    """5 layers, two documents: a second one, and a put-together output forward; backward three gradients, of 32
    numbers a token for queries and 16 for keys and values, whose heads are half as many. Read and written, 4 bytes."""
    work = training_work(on_meta("llama"), ROWS, TOKENS, TARGETS)
    assert (work.forward.apart_launches, work.backward.apart_launches) == (5, 5 * 3)
    assert work.forward.apart_documents == work.backward.apart_documents == 5
    assert work.forward.apart_bytes == 5 * 2 * 4 * ROWS * TOKENS * 32
    assert work.backward.apart_bytes == 5 * 2 * 4 * ROWS * TOKENS * (32 + 16 + 16)


def test_two_layers_stand_for_all(monkeypatch):
    """As if every layer ran, which they do if no two are of one kind."""
    of_two = training_work(on_meta("llama"), ROWS, TOKENS, TARGETS)
    monkeypatch.setattr(operators, "layer_kind", id)
    assert training_work(on_meta("llama"), ROWS, TOKENS, TARGETS) == of_two


def test_frozen_weights_have_no_gradient_and_a_compiler_moves_less():
    model = add_lora(on_meta("llama"), Lora(lora_dim=1))
    whole, adapted = (training_work(each, ROWS, TOKENS, TARGETS) for each in (on_meta("llama"), model))
    assert adapted.backward.matmul_flops < 0.75 * whole.backward.matmul_flops
    assert adapted.forward.matmul_flops > whole.forward.matmul_flops
    model = on_meta("llama")
    forward = training_work(model, ROWS, TOKENS, TARGETS).forward
    assert 0 < forward.fused_bytes < forward.moved_bytes / 2
    model.get_output_embeddings = lambda: None
    assert training_work(model, ROWS, TOKENS, TARGETS).head.matmul_flops == 0


def test_experts_read_the_tokens_that_visit_them():
    model = on_meta("qwen3_moe", torch.bfloat16, num_key_value_heads=2, moe_intermediate_size=16, num_experts=8,
                    num_experts_per_tok=2, head_dim=8)  # fmt: skip
    work = training_work(model, ROWS, TOKENS, TARGETS)
    # 32 tokens visit 2 of 8 experts, 8 each: gate and up together are 32 columns, down has 16 rows of weights.
    assert work.forward.matmuls[Matmul(8, 8, 32, 32)] == 5 and work.forward.matmuls[Matmul(8, 8, 32, 16)] == 5
    assert work.backward.matmul_flops == pytest.approx(2 * work.forward.matmul_flops)


def test_operators_are_told_apart_in_backwards_too():
    """Two products and two sums; a turn of the factor is a view, and what makes room is none of a kernel's work."""
    left, right = torch.randn(4, 8), torch.randn(8, 4)
    query = torch.randn(1, 2, 8, 4)
    with KernelSeconds() as inside:
        (left @ right + left @ left.t()).sum()
        torch.empty(3)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert inside.calls[PRODUCT] == 2 and inside.calls[MEMORY_BOUND] == 2 and inside.calls[ATTENTION] == 1
    assert inside.calls[VIEW] >= 2 and all(seconds >= 0 for seconds in inside.seconds.values())
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
    """Its attention is by document, and its norms and MLPs keep less, in the count on meta too. Of 4 layers on 4
    tokens: products, attention, and seconds outside of operators."""
    model = in_a_model._Llama(64, 1, 8, torch.float32, documents=2)
    kept = [part for part in model._model.modules() if "forward" in vars(part)]
    assert len(kept) == 4 * 3 + 1  # two norms and an MLP in a layer, and the last norm
    with KernelSeconds() as inside:
        model.forward()
    assert inside.calls[ATTENTION] == 2 * 4
    assert model.counted().forward.launches == in_a_model._Llama(64, 1, 8, torch.float32).counted().forward.launches
    ahead, behind = in_a_model._passes(in_a_model._Llama(8, 2, 4, torch.float32))
    assert ahead.calls[PRODUCT] == 4 * 7 and behind.calls[PRODUCT] == 2 * 4 * 7
    assert ahead.calls[ATTENTION] == behind.calls[ATTENTION] == 4
    for one in (ahead, behind):
        assert one.launched > 4 * 7 and one.moved > 0 and 0 < sum(one.kernels.values()) and one.seconds > 0


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


def test_several_threads_are_timed_by_the_clock_on_the_wall(monkeypatch):
    monkeypatch.setattr(in_a_model.time, "process_time", lambda: 1.0)
    monkeypatch.setattr(in_a_model.time, "perf_counter", lambda: 2.0)
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(now())
    assert found == [1.0, 2.0]
