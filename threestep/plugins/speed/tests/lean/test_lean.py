"""RMSNorms that keep less: the same numbers to the bit, of less memory."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.support.kept_bytes import kept_bytes
from tests.support.lora_settings import with_lora
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.speed.lean.forwards import keep_less
from threestep.plugins.speed.lean.gated_mlp import lean_mlp
from threestep.plugins.speed.lean.rms_norm import RmsNorm, lean_norm
from training.utils.models.settings import keeping_all

CLASSES = [LlamaRMSNorm, Olmo2RMSNorm, GemmaRMSNorm]
F16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
# Norms of two layers and the last one; of queries and keys, after attention and after the MLP where a family has them.
FAMILIES = dict.fromkeys(("llama", "mistral", "qwen2", "phi3", "granite", "smollm3", "gpt_oss", "gemma"), 5)
FAMILIES |= dict.fromkeys(("qwen3", "qwen3_moe", "olmo2", "deepseek_v3", "gemma2"), 9) | {"gemma3_text": 13}
SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
SHAPE |= dict(intermediate_size=48, vocab_size=64, pad_token_id=0)


def normed(kind: type[nn.Module], dtype: torch.dtype, width: int = 24) -> tuple[nn.Module, nn.Module]:
    """A norm of drawn weights, and the same that keeps less."""
    torch.manual_seed(1)
    plain: Any = kind(width)
    nn.init.normal_(plain.weight)
    plain, lean = plain.to(dtype), copy.deepcopy(plain).to(dtype)
    assert keep_less(lean) == 1 and keep_less(lean) == 0
    return plain, lean


def read(norm: nn.Module, x: torch.Tensor, reads_x_besides: bool) -> dict[str, torch.Tensor | None]:
    """The output and the gradients of a layer's two lines."""
    x = x.detach().requires_grad_(x.requires_grad)
    inner = x * 1.25 if reads_x_besides else x
    y = norm(inner)
    total = inner + 3 * y if reads_x_besides else y
    total.backward(torch.linspace(-1, 2, total.numel()).view(total.shape).to(total.dtype))
    weight: Any = norm.weight
    found, weight.grad = {"y": y.detach(), "x": x.grad, "weight": weight.grad}, None
    return found


def assert_same(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> None:
    for name, value in one.items():
        also = other[name]
        assert (value is None) == (also is None), name
        assert value is None or (value.dtype == also.dtype and torch.equal(value, also)), name


@pytest.mark.parametrize("besides", [False, True])  # a layer's residual sum reads the input too: a sum of three
@pytest.mark.parametrize("dtype", [F16, torch.float16, F32, F64])
@pytest.mark.parametrize("kind", CLASSES)
def test_numbers_are_those_of_the_plain_norm(kind, dtype, besides):
    plain, lean = normed(kind, dtype)
    for shape in [(3, 7, 24), (5, 24), (2, 7, 4, 24)]:
        x = (5 * torch.randn(shape)).to(dtype).requires_grad_()
        assert_same(read(plain, x, besides), read(lean, x, besides))

    for of_x in (F16, F32, F64):  # weights of another precision
        x = torch.randn(2, 7, 24).to(of_x).requires_grad_()
        assert_same(read(plain, x, besides), read(lean, x, besides))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [F16, F32])
def test_what_is_frozen_gets_no_gradient(kind, dtype):
    plain, lean = normed(kind, dtype)
    x = torch.randn(2, 7, 24).to(dtype)
    assert read(lean, x, False)["x"] is None
    assert_same(read(plain, x, False), read(lean, x, False))
    for norm in (plain, lean):
        norm.requires_grad_(False)
    assert read(lean, x.requires_grad_(), False)["weight"] is None
    assert_same(read(plain, x, True), read(lean, x, True))


def test_where_nothing_learns_the_forward_is_the_class_own(monkeypatch):
    plain, lean = normed(LlamaRMSNorm, F32)
    x = torch.randn(2, 7, 24)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: "own")
    with torch.no_grad():
        assert lean(x) == "own"
    assert lean.requires_grad_(False)(x) == "own" and lean(x.requires_grad_()) != "own"


@pytest.mark.parametrize(
    ("kind", "dtype", "before", "after"),
    [
        # A number of the input, in bytes: the input in float32 and what it normalizes, rounded or not; then the input.
        (LlamaRMSNorm, F32, 4 + 4, 4),
        (LlamaRMSNorm, F16, 4 + 2, 2),
        (LlamaRMSNorm, F64, 4 + 8, 8),
        (Olmo2RMSNorm, F32, 4 + 4, 4),
        (Olmo2RMSNorm, F16, 4 + 4, 2),
        (GemmaRMSNorm, F32, 4 + 4, 4),
        (GemmaRMSNorm, F16, 4 + 4, 2),
    ],
)
def test_what_is_held_between_forward_and_backward(kind, dtype, before, after):
    x = torch.randn(2, 7, 24).to(dtype).requires_grad_()
    plain, lean = normed(kind, dtype)
    of_tokens = 4 * 2 * 7  # 1 / rms, a float32 number a token
    of_weight = 4 * 24 if kind is GemmaRMSNorm else 0  # 1 + weight in float32, which the lean norm holds as it is
    assert kept_bytes(plain, lambda: plain(x)) == before * x.numel() + of_tokens + of_weight
    assert kept_bytes(lean, lambda: lean(x)) == after * x.numel() + of_tokens


@pytest.mark.parametrize(("dtype", "spared"), [(F32, 4), (F16, 4 + 2 - 2)])
def test_a_model_that_also_has_lean_mlps(dtype, spared):
    """Of five norms of width 32. Float32: what each normalized; bfloat16: that in 2 bytes, and the input in 2, not 4.
    A layer's MLP: activation and product, 2 x 48."""
    model, ids = tiny_causal_lm("llama", dtype).train(), torch.arange(24).view(2, 12)
    plain, held = gradients(model, ids), kept_bytes(model, lambda: model(input_ids=ids, labels=ids))
    assert keep_less(model) == 5 + 2
    assert_same(plain, gradients(model, ids))
    of_norms, of_mlps = 5 * 32 * spared, 2 * 2 * 48 * dtype.itemsize
    assert held - kept_bytes(model, lambda: model(input_ids=ids, labels=ids)) == ids.numel() * (of_norms + of_mlps)


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {"loss": loss.detach(), **{name: part.grad for name, part in model.named_parameters()}}
    model.zero_grad()
    return found


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_gradients_of_a_model(family, dtype, lora):
    torch.manual_seed(1)
    model = with_lora(tiny_causal_lm(family), lora).to(dtype).train()
    ids = torch.arange(24).view(2, 12)
    plain = gradients(model, ids)
    assert keep_less(model) == FAMILIES[family] + 2
    assert_same(plain, gradients(model, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_share_a_usual_form(family):
    experts = dict(num_experts=4, n_routed_experts=4, num_local_experts=4, num_experts_per_tok=2)
    config = AutoConfig.for_model(family, **SHAPE, **experts, moe_intermediate_size=16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    norms = [part for part in model.modules() if type(part).__name__.endswith("RMSNorm")]
    assert keep_less(model, [lean_norm]) == len(norms) == FAMILIES[family]


class CubedNorm(LlamaRMSNorm):
    """The same operations and names, but for a constant."""

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(3).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GroupedNorm(GemmaRMSNorm):
    """The usual forward around another `_norm`."""

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps)


def test_other_forms_are_left_alone():
    taken = LlamaRMSNorm(8)
    taken.forward = abs
    others = [nn.RMSNorm(8), nn.LayerNorm(8), T5LayerNorm(8), CubedNorm(8), GroupedNorm(8), taken]
    assert keep_less(nn.ModuleList(others)) == 0 and taken.forward is abs
    assert keep_less(tiny_causal_lm("gpt2")) == 0


def test_a_gradient_of_the_gradient_is_an_error():
    """Which no loss here takes; a second backward needs the graph kept."""
    _, lean = normed(LlamaRMSNorm, F32)
    x = torch.randn(2, 7, 24).requires_grad_()
    y = lean(x).sum()
    first, again = (torch.autograd.grad(y, [x, lean.weight], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()
    (slope,) = torch.autograd.grad(lean(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        slope.sum().backward()


def test_an_input_written_into_before_the_backward_is_noticed():
    _, lean = normed(LlamaRMSNorm, F16)
    x = torch.randn(2, 7, 24).to(F16).requires_grad_()
    inner = x * 2
    y = lean(inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_weight_taken_away_and_brought_back_is_read_in_the_backward():
    """As ZeRO-3 does between forward and backward: its storage is another then."""
    plain, lean = normed(LlamaRMSNorm, F32)
    x = torch.randn(2, 7, 24)
    found = []
    for norm in (plain, lean):
        own = x.detach().requires_grad_()
        y = norm(own)
        if norm is lean:
            whole = norm.weight.data
            norm.weight.data = whole.clone()
            whole.fill_(torch.nan)
        y.backward(torch.ones_like(y))
        found.append({"x": own.grad, "weight": norm.weight.grad})
    assert_same(*found)


def test_copies_and_pickles_have_a_norm_of_their_own():
    plain, lean = normed(LlamaRMSNorm, F32)
    x = torch.randn(2, 7, 24).requires_grad_()
    for other in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        assert isinstance(vars(other)["forward"], RmsNorm) and other.state_dict().keys() == {"weight"}
        assert_same(read(plain, x, False), read(other, x, False))
        nn.init.zeros_(other.weight)
        assert not other(x).any() and lean(x).any()


def test_inside_keeping_all_they_keep_all():
    plain, lean = normed(LlamaRMSNorm, F32)
    x = torch.randn(2, 7, 24).requires_grad_()
    with keeping_all([lean]):
        assert kept_bytes(lean, lambda: lean(x)) == kept_bytes(plain, lambda: plain(x))
    assert kept_bytes(lean, lambda: lean(x)) < kept_bytes(plain, lambda: plain(x))


def test_nothing_is_kept_where_nothing_learns():
    model = tiny_causal_lm("llama")
    keep_less(model, [lean_mlp])
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, tiny_causal_lm("llama")(input_ids=ids).logits)
