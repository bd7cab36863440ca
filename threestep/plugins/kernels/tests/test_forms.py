"""Forms of attention as plain functions: each is the dense mask's."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface

from tests.support.random_rows import random_rows
from tests.support.tiny_models import tiny_causal_lm
from tests.support.varlen_reference import varlen_attn
from threestep.plugins.kernels import forms, varlen
from threestep.plugins.kernels.forms import FORMS, attention_of, seconds_of_forms, time_on_first_rows
from training.utils.contracts.documents import TokenSequence, plain
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel


@pytest.fixture(autouse=True)
def a_kernel(monkeypatch):
    monkeypatch.setattr(forms, "torch_kernel", lambda: varlen_attn)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_dense_mask(form):
    rows = random_rows(torch.Generator().manual_seed(2), 3, 20)
    count, width = rows.input_ids_NT.shape
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(count, heads, width, 16, generator=generator) for heads in (4, 2, 2)]
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        got = attention_of(form, rows)(*parts)
    wanted = functional.scaled_dot_product_attention(*parts, attn_mask=rows.dense_mask(), enable_gqa=True)
    real_NT = rows.segment_ids_NT >= 0
    torch.testing.assert_close(got[real_NT], wanted.transpose(1, 2)[real_NT], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["sdpa", "varlen"])
def test_padded_rows_are_causal_without_a_mask(form):
    rows = packed_rows([[plain(TokenSequence(torch.arange(n), torch.zeros(n, dtype=torch.bool)))] for n in (5, 3)], 0)
    parts = [torch.randn(2, heads, 5, 8) for heads in (4, 2, 2)]
    wanted = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attention_of(form, rows)(*parts), wanted, rtol=1e-5, atol=1e-5)


def test_seconds_are_of_a_forward_and_backward():
    rows = random_rows(torch.Generator().manual_seed(2), 2, 8)
    seconds = seconds_of_forms(rows, 4, 2, 8, dtype=torch.float32, forms=("varlen", "sdpa"), repeats=2)
    assert list(seconds) == ["varlen", "sdpa"] and all(0 < each < 10 for each in seconds.values())


def test_a_kernel_is_held_against_the_mask(monkeypatch):
    shape, device = (4, 2, 8), torch.device("cpu")
    assert forms.why_not_the_mask("varlen", shape, torch.float32, device) is None
    assert forms.why_not_the_mask("varlen", shape, torch.bfloat16, device) is None

    def of_other_keys(query, key, value, *given, **named):  # right forward, gradients of the keys one place on
        moved = key.roll(1, 0)
        return varlen_attn(query, key.detach() + moved - moved.detach(), value, *given, **named)

    monkeypatch.setattr(forms, "torch_kernel", lambda: of_other_keys)
    reason = forms.why_not_the_mask("varlen", shape, torch.float32, device)
    assert re.fullmatch(r"its gradients of keys here are off by [\d.]+ of the largest that a dense mask gives", reason)


def test_the_first_packed_rows_are_timed_once_and_nothing_else_changes(monkeypatch):
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    monkeypatch.setattr(varlen, "torch_kernel", lambda: varlen_attn)
    model, said = tiny_causal_lm("llama"), []
    varlen.use_varlen_attention(model)
    reader = PolicyModel(model)
    rows = random_rows(torch.Generator().manual_seed(2), 2, 8)
    one = packed_rows([[plain(TokenSequence(torch.arange(5), torch.zeros(5, dtype=torch.bool)))]], 0)
    time_on_first_rows(reader, model, said.append)
    state = torch.random.get_rng_state()
    reader.eval()(rows)
    reader.train()(one)
    assert said == []
    with torch.no_grad():
        reader(rows)
    reader(rows)
    assert torch.equal(torch.random.get_rng_state(), state)
    (sentence,) = said
    times = r"varlen [\d.]+ ms, sdpa [\d.]+ ms(; --attn_implementation sdpa is the faster one here)?"
    width = rows.input_ids_NT.shape[1]
    assert re.fullmatch(rf"attention of 2 x {width} tokens, forward and backward of one layer: {times}", sentence)
    monkeypatch.setattr(forms, "_MOST_MASK_BYTES", 10)
    time_on_first_rows(reader, model, said.append)
    reader(rows)
    assert re.search(r"varlen [\d.]+ ms; sdpa was not timed: its dense mask has [\d.e-]+ billion pairs$", said[1])
