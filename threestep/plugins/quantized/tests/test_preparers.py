"""Models as they are loaded with rounded weights, without weights for a dry run, and as references."""

from __future__ import annotations

import pytest
import torch

from tests.support.lora_settings import lora_settings
from threestep.plugins.plan.dry_run.meta import as_counted, model_on_meta
from threestep.plugins.plan.tests.dry_run.test_dry_run import SHAPE, settings
from threestep.plugins.quantized.arguments import QuantizationArguments
from threestep.plugins.quantized.layers import weight_bytes
from threestep.plugins.quantized.preparers import RoundedWeights, preparers
from threestep.plugins.quantized.quantization import Quantization
from training.utils.flags.added import AddedFlags, added_flags
from training.utils.loading.models import load_causal_lm
from training.utils.models.own_forward import current_difference, own_forward_of
from training.utils.models.settings import ModelSettings
from training.utils.models.weights import count_weights, packed_layers
from training.utils.preference.reference import precision_of

INT8, NF4 = RoundedWeights(Quantization("int8")), RoundedWeights(Quantization("nf4"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, []),
        ({"load_in_8bit": True}, [INT8]),
        ({"load_in_4bit": True}, [NF4]),
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
    settings = lora_settings(folder, lora_dim=4, preparers=(INT8,))
    model = load_causal_lm(settings, torch.float32, len(tiny_tokenizer))
    own = own_forward_of(model)
    assert own is not None and current_difference(model, own) <= own.tolerance
    exact = load_causal_lm(ModelSettings(folder), torch.float32, len(tiny_tokenizer))
    assert current_difference(exact, own) > own.tolerance
    layers = 7 * model.config.num_hidden_layers
    said = capsys.readouterr().out
    assert f"model: {layers} linear layers are kept in int8, other weights in float32: the base takes " in said
    assert "saved models have the rounded weights in float32" in said


def test_numbers_of_rounded_weights_are_files_of_their_own():
    """They would else be read as those of the exact ones, and the policy would not start as its reference."""
    plain, nf4, int8 = (precision_of("bf16", ModelSettings("m", preparers=each)) for each in ((), (NF4,), (INT8,)))
    assert (plain, nf4, int8) == ("bf16", "bf16 on weights in nf4", "bf16 on weights in int8")


@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_weights_are_planned_without_a_package_and_without_values(tmp_path, bits):
    loading = settings(tmp_path, SHAPE, lora_dim=2, preparers=(NF4 if bits == 4 else INT8,))
    plain = model_on_meta(lora_settings(str(tmp_path), lora_dim=2), torch.bfloat16)
    model = model_on_meta(loading, torch.bfloat16)
    layers = [layer for _, layer in packed_layers(model)]
    assert len(layers) == 7 * 2 and count_weights(model) == count_weights(plain)
    elements = sum(layer.in_features * layer.out_features for layer in layers)
    scales = elements // 64 if bits == 4 else sum(layer.out_features for layer in layers)
    assert weight_bytes(plain) - weight_bytes(model) == 2 * elements - elements * bits // 8 - 4 * scales
    assert model(torch.zeros(1, 5, dtype=torch.long, device="meta")).logits.shape == (1, 5, 64)
