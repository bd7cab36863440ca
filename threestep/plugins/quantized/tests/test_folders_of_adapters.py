"""Adapters whose base is stored quantized: merged into whole weights, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.utils.loading.test_adapters import LORA, load
from training.utils.base.errors import ThreestepError
from training.utils.loading.configurations import check_trains
from training.utils.models.settings import ModelSettings


def test_a_quantized_base(adapter):
    folder, _ = adapter(peft.LoraConfig(**LORA))
    config = Path(folder).parent / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(
        ThreestepError, match="whose weights are quantized, so that a merge would round; write the model"
    ):
        load(folder)
    with pytest.raises(
        ThreestepError, match=f"of the adapter '{folder}' the base: '{config.parent}': expected whole w"
    ) as said:
        check_trains(ModelSettings(folder), generates=True)
    assert str(said.value).endswith(f"and write it to base_model_name_or_path in '{folder}/adapter_config.json'")


def test_an_adapter_on_weights_in_fp8_is_merged_into_whole_ones(adapter):
    """transformers makes whole weights of them as it loads the base."""
    folder, _ = adapter(peft.LoraConfig(**LORA))
    base = Path(json.loads(Path(folder, "adapter_config.json").read_text())["base_model_name_or_path"])
    name, block = "model.layers.0.mlp.up_proj.weight", [16, 16]
    file = base / "model.safetensors"
    stored = dict(load_file(file))
    stored[f"{name}_scale_inv"] = torch.ones(*(side // 16 for side in stored[name].shape))
    stored[name] = stored[name].to(torch.float8_e4m3fn)
    others = ["lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "layers.1"]
    given = {"quant_method": "fp8", "weight_block_size": block, "modules_to_not_convert": others}
    save_file(stored, file, {"format": "pt"})
    config = base / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": given}))
    model = load(folder)
    torch.testing.assert_close(model.get_parameter(name), stored[name].float(), rtol=1e-6, atol=0)
    assert not hasattr(model.config, "quantization_config")
