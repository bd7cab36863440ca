"""Rounded base weights: what they take, what is computed from them, and what is saved of them."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch.nn import functional

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from tests.support.vision_models import FAMILIES
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from threestep.plugins.quantized.layers import (
    QuantizedLinear,
    dequantized,
    quantizable_layers,
    quantize_layers,
    quantized,
    weight_bytes,
)
from threestep.plugins.quantized.quantization import Quantization
from training.utils.engine.zero3 import full_tensors
from training.utils.models.families import is_beside_language
from training.utils.models.flops import model_shape
from training.utils.models.weights import adapters_off, count_weights, packed_layers

INT8 = Quantization("int8")
FOUR_BITS = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="needs the package bitsandbytes: pip install bitsandbytes",
)
KINDS = [
    pytest.param(INT8, id="int8"),
    *(
        pytest.param(kind, id=str(kind), marks=FOUR_BITS)
        for kind in (Quantization("nf4"), Quantization("nf4", double=True), Quantization("fp4"))
    ),
]
LORA = Lora(4)
IDS = torch.arange(3, 15)[None]


def rounded(family: str, kind: Quantization = INT8, make=tiny_causal_lm):
    """A model with rounded layers and adapters that are not zero."""
    model = make(family)
    quantize_layers(model, kind)
    model = add_lora(model, LORA).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(96, 64), (33, 7)])
def test_a_weight_is_close_to_what_it_was_and_its_parts_are_those_of_a_dry_run(kind, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts = quantized(weight, kind)
    back = dequantized(parts, kind, shape, torch.float32)
    # Steps of int8: 2 / 254 of a row's largest weight; of 4 bits: 2 / 15 at the mean, of a block's.
    most = 0.01 if kind is INT8 else 0.2
    assert 0 < float((back - weight).norm() / weight.norm()) < most
    assert not any(part.is_floating_point() for part in parts.values())  # a cast would round a scale
    planned = QuantizedLinear(torch.nn.Linear(shape[1], shape[0], device="meta"), kind, None)
    assert {name: (part.shape, part.dtype) for name, part in planned.named_buffers()} == {
        name: (part.shape, part.dtype) for name, part in parts.items()
    }


def test_int8_by_hand():
    """A row's largest weight is 127 steps: rows [1.27, -0.64] and [0, 0] in steps of 0.01 (and none)."""
    parts = quantized(torch.tensor([[1.27, -0.643], [0.0, 0.0]]), INT8)
    assert parts["packed"].tolist() == [[127, -64], [0, 0]]
    assert dequantized(parts, INT8, (2, 2), torch.float64).tolist() == [
        pytest.approx([1.27, -0.64], rel=1e-6),
        [0.0, 0.0],
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradient_are_those_of_a_linear_layer(kind, dtype):
    layer = QuantizedLinear(torch.nn.Linear(16, 12, dtype=dtype), kind, None)
    given = torch.randn(3, 5, 16, dtype=dtype)
    mine, theirs = (given.clone().requires_grad_() for _ in range(2))
    out, expected = layer(mine), functional.linear(theirs, layer.weight, layer.bias)
    assert out.equal(expected) and out.dtype == dtype
    (out.float() ** 2).sum().backward()
    (expected.float() ** 2).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    with torch.no_grad():
        assert layer.eval()(given).equal(out)  # bitsandbytes' own layers change here on some CPUs


def test_a_cast_leaves_the_weights_alone():
    layer = QuantizedLinear(torch.nn.Linear(16, 12), INT8, None)
    cast, same = copy.deepcopy(layer).bfloat16(), copy.deepcopy(layer)
    assert cast.whole(torch.float32).equal(layer.weight) and same.weight.equal(layer.weight)
    same.load_state_dict(cast.state_dict())


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_token_depends_on_nothing_else_in_its_batch(family):
    """LLM.int8() would find outliers over the whole batch."""
    model = rounded(family)
    alone = logits(model)
    with torch.no_grad():
        beside = model(torch.cat([IDS, IDS.flip(1) * 3]), use_cache=False).logits[:1]
    torch.testing.assert_close(alone, beside, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_what_is_saved_is_what_was_computed(family, kind):
    """Merged weights give the adapted model, unmerged ones the reference; a Conv1D's are [inputs, outputs] again."""
    model, plain = rounded(family, kind), tiny_causal_lm(family)
    assert any(layer.transposed for _, layer in packed_layers(model)) == (family == "gpt2")
    names = {name for name, _ in plain.named_parameters()}
    for merged in (True, False):
        saved = {name: tensor.clone() for name, tensor in full_tensors(model, 0, merged)}
        assert names <= saved.keys() and not any("packed" in name or "lora" in name for name in saved)
        plain.load_state_dict(saved, strict=False)
        if merged:
            computed = logits(model)
        else:
            with adapters_off(model):
                computed = logits(model)
        torch.testing.assert_close(logits(plain), computed, rtol=1e-4, atol=1e-4)


def test_heads_and_embeddings_stay_and_adapters_alone_train():
    for make, head in ((tiny_causal_lm, "lm_head"), (tiny_scalar_model, "score")):
        model = rounded("llama", make=make)
        assert type(model.get_submodule(head)) is torch.nn.Linear
        names = [name for name, _ in packed_layers(model)]
        assert len(names) == 7 * model.config.num_hidden_layers and all("base_layer" in name for name in names)
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        assert {name for name in trained if ".lora_" not in name} == ({"score.weight"} if head == "score" else set())
        loss = model(IDS, use_cache=False).logits.square().sum()
        loss.backward()
        assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_weights_are_counted_and_take_less():
    model, plain = tiny_causal_lm("llama"), tiny_causal_lm("llama")
    before = weight_bytes(model)
    done = quantize_layers(model, INT8)
    assert count_weights(model) == count_weights(plain)
    assert (done.bytes_before, done.bytes_after) == (before, weight_bytes(model)) and done.bytes_after < before
    layers = [layer for _, layer in packed_layers(model)]
    elements = sum(layer.in_features * layer.out_features for layer in layers)
    outputs = sum(layer.out_features for layer in layers)
    assert before - done.bytes_after == 3 * elements - 4 * outputs  # float32 to int8, and a scale an output
    shapes = model_shape(model), model_shape(plain.requires_grad_(False))
    assert shapes[0].body_frozen + shapes[0].body_trained == shapes[1].body_frozen


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tower_is_left_as_it_is(family):
    model = FAMILIES[family]().model.float()
    layers = quantizable_layers(model)
    assert len(layers) == 14 and not any(map(is_beside_language(model), layers))
