"""Weights that are stored quantized are read as the whole weights that they stand for, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from threestep.plugins.lora.tests.test_merging import LORA, load
from training.utils.base.errors import ThreestepError
from training.utils.loading.configurations import check_trains, load_config
from training.utils.loading.models import load_causal_lm
from training.utils.loading.weight_files import WholeWeights, check_form, stored_form
from training.utils.models.settings import ModelSettings

BLOCK = 16


def settings_in(folder: str, **entries: Any) -> None:
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def in_fp8(folder: str) -> dict[str, torch.Tensor]:
    """Store a folder's linear layers as DeepSeek-V3 stores its own: float8 and a scale for each block. Returns what
    they stand for."""
    file = Path(folder, "model.safetensors")
    stored, whole = dict(load_file(file)), {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        weight = stored[name]
        tiled = weight.view(weight.shape[0] // BLOCK, BLOCK, weight.shape[1] // BLOCK, BLOCK)
        scales = tiled.abs().amax((1, 3)) / 448
        rounded = (tiled / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        whole[name] = (rounded.float() * scales[:, None, :, None]).view_as(weight)
        stored[name], stored[f"{name}_scale_inv"] = rounded.view(*weight.shape), scales
    save_file(stored, file, {"format": "pt"})
    settings_in(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    return whole


def in_mxfp4(folder: str) -> dict[str, torch.Tensor]:
    """Store random experts as gpt-oss stores its own: pairs of 4-bit floats, and an exponent for each 32 of them."""
    file = Path(folder, "model.safetensors")
    stored, whole = dict(load_file(file)), {}
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 124, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, file, {"format": "pt"})
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings_in(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left})
    return whole


def loaded(folder: str, tokenizer: Any) -> Any:
    return load_causal_lm(ModelSettings(folder), torch.float32, len(tokenizer))


def test_weights_in_fp8_are_read_as_what_they_stand_for(save_folder, tiny_tokenizer, capsys):
    folder = save_folder()
    whole = in_fp8(folder)
    check_trains(ModelSettings(folder), generates=True)
    said = capsys.readouterr().out
    assert (
        f"the weights of '{folder}' are stored in FP8 (quantization_config in its config.json); they are dequantized"
        in said
    )
    model = loaded(folder, tiny_tokenizer)
    state = model.state_dict()
    assert len(whole) == 14 and all(torch.allclose(state[name], whole[name], rtol=1e-6) for name in whole)
    assert model.dtype is torch.float32 and not hasattr(model.config, "quantization_config")


def test_experts_in_mxfp4_are_read_as_what_they_stand_for(tmp_path, tiny_tokenizer):
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", vocab_size=len(tiny_tokenizer), max_position_embeddings=64, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    whole = in_mxfp4(str(tmp_path))
    model = loaded(str(tmp_path), tiny_tokenizer)
    state = model.state_dict()
    assert len(whole) == 2 and all(torch.equal(state[name].float(), whole[name]) for name in whole)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes has quantized them to 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes has quantized them to 8 bits"),
        ({"load_in_8bit": True}, "with LoRA and --load_in_4bit or --load_in_8bit to quantize it"),  # an older folder
        (
            {"quant_method": "gptq", "bits": 4},
            "gptq has quantized them .quantization_config in its config.json., and",
        ),
        ({"quant_method": "awq"}, "awq has quantized them .* pass the original, unquantized model$"),
        ({"quant_method": "mxfp8"}, "mxfp8 has quantized them"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors has quantized them"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_cannot_be_trained(given, words, nested):
    config: Any = PreTrainedConfig()
    if nested:
        config.text_config = PreTrainedConfig(quantization_config=given)
    else:
        config.quantization_config = given
    check_form(config, "FOLDER")  # a finished model may be read in it
    with pytest.raises(ThreestepError, match=f"'FOLDER': expected unquantized weights to train, but .*{words}"):
        stored_form(config).check_trains(config, "FOLDER")
    form = stored_form(config)
    assert not isinstance(form, WholeWeights) and not form.is_read_whole(config)


@pytest.mark.parametrize("given", [{"quant_method": "magic"}, {}, {"bits": 4}, {"quant_method": 3}, [], "fp8", 3])
def test_a_method_that_nobody_knows(save_folder, capsys, given):
    folder = save_folder()
    check_trains(ModelSettings(folder), generates=True)
    assert capsys.readouterr().out == ""  # whole weights pass without a word
    settings_in(folder, quantization_config=given)
    words = r"config.json': quantization_config must be a JSON object that says how"
    if isinstance(given, dict):
        words = f"needs a quant_method that is one of aqlm, .*, vptq, got {given.get('quant_method')!r}; pass the"
    with pytest.raises(ThreestepError, match=words):
        load_config(folder)


def test_a_quantized_base(adapter):
    folder, _ = adapter(peft.LoraConfig(**LORA))
    base = Path(folder).parent / "model"
    settings_in(str(base), quantization_config={"quant_method": "awq"})
    with pytest.raises(ThreestepError, match="weights are quantized, so merging would round them; set base_model"):
        load(folder)
    words = f"the base model of the adapter '{folder}': '{base}': expected unquantized w"
    with pytest.raises(ThreestepError, match=words) as said:
        check_trains(ModelSettings(folder), generates=True)
    assert str(said.value).endswith(f"and set base_model_name_or_path in '{folder}/adapter_config.json'")


def test_an_adapter_on_weights_in_fp8_is_merged_into_whole_ones(adapter):
    """transformers makes whole weights of them as it loads the base."""
    folder, _ = adapter(peft.LoraConfig(**LORA))
    base = Path(json.loads(Path(folder, "adapter_config.json").read_text())["base_model_name_or_path"])
    whole = in_fp8(str(base))
    model = load(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(model.get_parameter(name), whole[name], rtol=1e-6, atol=0)
    assert not hasattr(model.config, "quantization_config")
