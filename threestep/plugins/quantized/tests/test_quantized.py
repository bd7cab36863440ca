"""Rounded base weights: what they cannot go with, what they take, what is computed from them and saved of them."""

from __future__ import annotations

import copy
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

import threestep.plugins.mtp  # noqa: F401 (its flag is in a case)
from tests.support.lora_settings import lora_settings
from tests.support.one_model_flags import one_model_flags
from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from tests.support.vision_models import FAMILIES
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from threestep.plugins.plan.dry_run.meta import as_counted, model_on_meta
from threestep.plugins.plan.tests.dry_run.test_dry_run import SHAPE, settings
from threestep.plugins.quantized import checks
from threestep.plugins.quantized.arguments import QuantizationArguments
from threestep.plugins.quantized.checks import check
from threestep.plugins.quantized.layers import (
    QuantizedLinear,
    dequantized,
    quantizable_layers,
    quantize_layers,
    quantized,
    weight_bytes,
)
from threestep.plugins.quantized.preparers import RoundedWeights, preparers
from threestep.plugins.quantized.quantization import Quantization
from training.step1_sft import STEP
from training.step1_sft.main import main
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.engine.zero3 import full_tensors
from training.utils.flags.added import AddedFlags, added_flags
from training.utils.loading.models import load_causal_lm
from training.utils.models.families import is_beside_language
from training.utils.models.flops import model_shape
from training.utils.models.own_forward import current_difference, own_forward_of
from training.utils.models.settings import ModelSettings
from training.utils.models.weights import adapters_off, count_weights, packed_layers
from training.utils.preference.reference import precision_of

LORA = {"actor_lora_dim": 4, "critic_lora_dim": 4}
WHOLE = "because quantized weights are not sharded across ranks; leave one of them out"
MODELS = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}


@pytest.fixture(autouse=True)
def bitsandbytes(monkeypatch):
    """The package is there, by its name."""
    monkeypatch.setattr(checks, "find_spec", lambda name: SimpleNamespace(name=name))


def mistakes_of(flags: Any) -> list[str]:
    mistakes = Mistakes()
    check(flags, mistakes)
    return mistakes.sentences


NO_RANK = (
    "--load_in_{} freezes the weights that it quantizes, so only adapters can train, but --{}lora_dim is 0; set a "
    "rank, such as --{}lora_dim 16"
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", None),
        ("--load_in_8bit --lora_dim 4 --zero_stage 2", None),
        ("--load_in_4bit", NO_RANK.format("4bit", "", "")),
        (
            "--load_in_8bit --lora_dim 4 --only_optimize_lora false",
            "--load_in_8bit freezes the weights that it quantizes, but --only_optimize_lora false trains them; leave",
        ),
        (
            "--load_in_8bit --load_in_4bit --lora_dim 4",
            "--load_in_4bit and --load_in_8bit contradict each other; leave one of them out",
        ),
        (
            "--load_in_8bit --lora_dim 4 --bnb_4bit_quant_type fp4",
            "--bnb_4bit_quant_type fp4 applies to --load_in_4bit, which is off; leave --bnb_4bit_quant_type fp4 out",
        ),
        (
            "--lora_dim 4 --bnb_4bit_use_double_quant",
            "--bnb_4bit_use_double_quant applies to --load_in_4bit, which is off; leave --bnb_4bit_use_double_qua",
        ),
        (
            "--load_in_8bit --lora_dim 4 --use_dora",
            "--load_in_8bit does not work with --use_dora, whose magnitudes are",
        ),
        ("--load_in_8bit --lora_dim 4 --zero_stage 3", f"--load_in_8bit does not work with --zero_stage 3, {WHOLE}"),
    ],
)
def test_mistakes_of_a_step_of_one_model(words, said):
    found = mistakes_of(one_model_flags(STEP, words))
    assert len(found) == (said is not None) and all(each.startswith(said) for each in found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (LORA, None),
        ({"critic_lora_dim": 4}, NO_RANK.format("8bit", "actor_", "actor_")),
        ({"actor_lora_dim": 4}, NO_RANK.format("8bit", "critic_", "critic_")),
        ({"actor_lora_dim": 4, "advantage": "grpo"}, None),
        ({**LORA, "actor_zero_stage": 3}, f"--load_in_8bit does not work with --actor_zero_stage 3, {WHOLE}"),
        ({**LORA, "critic_zero_stage": 3}, f"--load_in_8bit does not work with --critic_zero_stage 3, {WHOLE}"),
        (
            {**LORA, "share_trunk": True},
            "--load_in_8bit does not work with --share_trunk, which shares one model's weights",
        ),
    ],
)
def test_mistakes_of_step_3(given, said):
    found = mistakes_of(ppo_flags(**MODELS, load_in_8bit=True, **given))
    assert len(found) == (said is not None) and all(each.startswith(said) for each in found)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "8bit --zero_stage 3",
            "8bit does not work with --zero_stage 3, because quantized weights are not sharded across ranks; leave",
        ),
        (
            "8bit --mtp_num_layers 1",
            "8bit does not work with --mtp_num_layers 1, whose head starts as a copy of an unq",
        ),
        ("4bit", "4bit needs the bitsandbytes package, .*; run pip install bitsandbytes, or use"),
    ],
)
def test_a_step_asks_before_it_looks_for_the_model(monkeypatch, flags, sentence):
    """Also for what its guests need."""
    if flags == "4bit":
        monkeypatch.setattr(checks, "find_spec", lambda name: None)
    given = f"--model_name_or_path no/model --data_path embedded --lora_dim 4 --load_in_{flags}"
    with pytest.raises(ThreestepError, match=f"--load_in_{sentence}"):
        main(given.split())


IN_INT8, IN_NF4 = RoundedWeights(Quantization("int8")), RoundedWeights(Quantization("nf4"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, []),
        ({"load_in_8bit": True}, [IN_INT8]),
        ({"load_in_4bit": True}, [IN_NF4]),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
            [RoundedWeights(Quantization("fp4", double=True))],
        ),
    ],
)
def test_flags_round_the_trained_models_alone(given, wanted):
    kind = added_flags("step1_sft")
    added = kind(quantized_QuantizationArguments=QuantizationArguments(**given))
    assert list(preparers(added, "")) == wanted and list(preparers(AddedFlags(), "")) == []
    loading = lora_settings("m", lora_dim=4, preparers=tuple(preparers(added, "")))
    assert loading.waits_for_device == bool(wanted) and loading.as_it_is().preparers == ()
    assert as_counted(loading).weights_form == loading.weights_form


def test_base_weights_are_rounded_before_they_are_measured(save_folder, tiny_tokenizer, capsys):
    """What checks of layouts compare with is the rounded model, and adapters stand on it."""
    folder = save_folder()
    settings = lora_settings(folder, lora_dim=4, preparers=(IN_INT8,))
    model = load_causal_lm(settings, torch.float32, len(tiny_tokenizer))
    own = own_forward_of(model)
    assert own is not None and current_difference(model, own) <= own.tolerance
    exact = load_causal_lm(ModelSettings(folder), torch.float32, len(tiny_tokenizer))
    assert current_difference(exact, own) > own.tolerance
    layers = 7 * model.config.num_hidden_layers
    said = capsys.readouterr().out
    assert (
        f"model: {layers} linear layers are stored in int8, all other weights in float32: the base model takes " in said
    )
    assert "saved models have the quantized weights in float32" in said


def test_numbers_of_rounded_weights_are_files_of_their_own():
    """They would else be read as those of the exact ones, and the policy would not start as its reference."""
    plain, nf4, int8 = (
        precision_of("bf16", ModelSettings("m", preparers=each)) for each in ((), (IN_NF4,), (IN_INT8,))
    )
    assert (plain, nf4, int8) == ("bf16", "bf16 on weights in nf4", "bf16 on weights in int8")


@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_weights_are_planned_without_a_package_and_without_values(tmp_path, bits):
    loading = settings(tmp_path, SHAPE, lora_dim=2, preparers=(IN_NF4 if bits == 4 else IN_INT8,))
    plain = model_on_meta(lora_settings(str(tmp_path), lora_dim=2), torch.bfloat16)
    model = model_on_meta(loading, torch.bfloat16)
    layers = [layer for _, layer in packed_layers(model)]
    assert len(layers) == 7 * 2 and count_weights(model) == count_weights(plain)
    elements = sum(layer.in_features * layer.out_features for layer in layers)
    scales = elements // 64 if bits == 4 else sum(layer.out_features for layer in layers)
    assert weight_bytes(plain) - weight_bytes(model) == 2 * elements - elements * bits // 8 - 4 * scales
    assert model(torch.zeros(1, 5, dtype=torch.long, device="meta")).logits.shape == (1, 5, 64)


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
ADAPTERS = Lora(4)
IDS = torch.arange(3, 15)[None]


def rounded(family: str, kind: Quantization = INT8, make=tiny_causal_lm):
    """A model with rounded layers and adapters that are not zero."""
    model = make(family)
    quantize_layers(model, kind)
    model = add_lora(model, ADAPTERS).eval()
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
