"""Attention of runs in one kernel gives what the dense mask gives, gradients included, in float64; the kernel is a
reference with the signature of torch's."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from tests.support.random_rows import parallel_row, random_rows
from tests.support.tiny_models import tiny_causal_lm
from tests.support.tries import trie_row
from tests.support.varlen_reference import varlen_attn
from threestep.plugins.kernels import forms, varlen
from threestep.plugins.kernels.forms import FORMS, attention_of, seconds_of_forms, time_on_first_rows
from threestep.plugins.kernels.varlen import (
    VARLEN,
    VarlenAttention,
    torch_kernel,
    use_varlen_attention,
    why_no_kernel,
)
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel


def tokens(length: int) -> TokenSequence:
    return TokenSequence(torch.arange(10, 10 + length), torch.zeros(length, dtype=torch.bool))


def shared(prompt: int, *responses: int) -> Document:
    return shared_prompt(tokens(prompt), [tokens(length) for length in responses])


LAYOUTS = {
    "documents": lambda: packed_rows([[plain(tokens(7)), plain(tokens(1)), plain(tokens(12))], [plain(tokens(9))]], 0),
    "one prompt, five responses": lambda: packed_rows([[shared(11, 4, 1, 9, 3, 6)]], 0),
    "two rows of prompts": lambda: packed_rows([[shared(5, 3, 2), plain(tokens(4))], [shared(2, 8, 1, 1)]], 0),
    "parallel paths": parallel_row,
    "tries": trie_row,
    "random": lambda: random_rows(torch.Generator().manual_seed(3), 3, 9),
}


def without_groups(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, *, scale: Any = None,
    window_size: Any = (-1, -1),
) -> torch.Tensor:  # fmt: skip
    """As of torch 2.11."""
    assert query.shape[1] == key.shape[1]
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def parts_of(rows: TokenRows, heads: int, shared_heads: int, size: int, value_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    count, width = rows.input_ids_NT.shape
    shapes = ((heads, size), (shared_heads, size), (shared_heads, value_size))
    return [
        torch.randn(count, number, width, each, generator=generator, dtype=torch.float64).requires_grad_()
        for number, each in shapes
    ]


@pytest.mark.parametrize("kernel", [varlen_attn, without_groups])
@pytest.mark.parametrize(
    ("heads", "shared_heads", "size", "value_size", "scale"), [(4, 2, 8, 8, 0.3), (3, 1, 10, 6, None)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_dense_mask_forward_and_backward(layout, heads, shared_heads, size, value_size, scale, kernel):
    """Also of heads that share keys, of sizes that are no multiple of 8 (the scale is of the size before it is filled),
    and of values narrower than keys."""
    rows = LAYOUTS[layout]()
    parts = parts_of(rows, heads, shared_heads, size, value_size)
    dense = functional.scaled_dot_product_attention(*parts, attn_mask=rows.dense_mask(), scale=scale, enable_gqa=True)
    given = {} if scale is None else {"scaling": scale}
    ours, sums = VarlenAttention(kernel)(torch.nn.Identity(), *parts, None, runs=rows.lengths(), **given)
    assert sums is None
    real_NT = rows.segment_ids_NT >= 0  # what padding reads is nobody's
    wanted, got = dense.transpose(1, 2)[real_NT], ours[real_NT]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = (torch.autograd.grad((read * weights).sum(), parts) for read in (got, wanted))
    for ours_grad, dense_grad in zip(*gradients, strict=True):
        torch.testing.assert_close(ours_grad, dense_grad, rtol=0, atol=1e-12)


def test_gradients_of_shared_keys_are_added_in_float32():
    """On CUDA an addition in bfloat16 would round at each of the responses that see a key; a CPU's adds them wide."""
    key = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    added: list[torch.dtype] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "index_add" in str(function):
                added.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    read = varlen._Seen.apply(key, torch.tensor([0, 0, 1, 0])).sum()
    with Noting():
        read.backward()
    assert key.grad.flatten().tolist() == [3, 1] and key.grad.dtype == torch.bfloat16 and added == [torch.float32]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt", "gemma3_text"])
def test_a_model_reads_and_learns_the_same(family, monkeypatch):
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    monkeypatch.setattr(varlen, "torch_kernel", lambda: varlen_attn)
    model, rows = tiny_causal_lm(family, torch.float64), LAYOUTS["random"]()
    if family == "gemma3_text":
        model = tiny_causal_lm(family, torch.float64, sliding_window=64)

    def read() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        logprobs_M = PolicyModel(model)(rows).logprobs_M
        logprobs_M.square().sum().backward()
        return logprobs_M.detach(), {name: part.grad.clone() for name, part in model.named_parameters()}

    dense, dense_gradients = read()
    use_varlen_attention(model)
    assert model.config._attn_implementation == VARLEN
    ours, gradients = read()
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)
    for name, gradient in dense_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("given", "what"),
    [({"dropout": 0.1}, "dropout of 0.1"), ({"s_aux": torch.ones(2)}, "s_aux"), ({"softcap": 5.0}, "softcap")],
)
def test_what_the_kernel_cannot_is_said(given, what):
    rows = LAYOUTS["documents"]()
    attention = VarlenAttention(varlen_attn)
    with pytest.raises(ThreestepError, match=f"^varlen attention does not support {what}, which Identity uses; use"):
        attention(torch.nn.Identity(), *parts_of(rows, 2, 2, 8, 8), None, runs=rows.lengths(), **given)


def test_torch_has_the_kernel_as_the_reference_says():
    assert why_no_kernel() is None
    theirs, ours = (inspect.signature(each).parameters for each in (torch_kernel(), varlen_attn))
    assert list(theirs)[:7] == list(ours)[:7] and {"scale", "window_size"} <= theirs.keys()
    assert set(theirs) <= set(ours)


def test_a_torch_without_the_kernel_is_named(monkeypatch):
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        raise AssertionError

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    assert why_no_kernel() == f"varlen_attn in torch {torch.__version__} lacks the scale and window_size arguments"
    monkeypatch.setitem(__import__("sys").modules, "torch.nn.attention.varlen", None)
    assert why_no_kernel() == f"torch {torch.__version__} has no torch.nn.attention.varlen"


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
    assert re.fullmatch(r"its gradients of keys differ here by [\d.]+ of the largest value with a dense mask", reason)


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
    times = r"varlen [\d.]+ ms, sdpa [\d.]+ ms(; --attn_implementation sdpa is faster here)?"
    width = rows.input_ids_NT.shape[1]
    assert re.fullmatch(rf"attention over 2 x {width} tokens, forward and backward of one layer: {times}", sentence)
    monkeypatch.setattr(forms, "_MOST_MASK_BYTES", 10)
    time_on_first_rows(reader, model, said.append)
    reader(rows)
    assert re.search(
        r"varlen [\d.]+ ms; sdpa was not timed because its dense mask has [\d.e-]+ billion entries$", said[1]
    )
