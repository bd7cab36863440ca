"""Each field of PEFT's LoraConfig is a flag, has no effect, or is refused by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.peft_settings import flags_of_adapters
from threestep.plugins.lora.preparers import Lora
from training.utils.base.errors import ThreestepError
from training.utils.engine.zero3 import full_tensors

peft = pytest.importorskip("peft")


def config(**fields):
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **fields})


def test_fields_are_flags():
    flags = {"lora_dim": 4, "lora_alpha": 8.0, "lora_dropout": 0.1, "lora_module_name": "q_proj$,v_proj$"}
    flags["use_dora"] = False
    given = config(lora_dropout=0.1, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    assert flags_of_adapters(given, "dpo", {}) == flags
    renamed = {"lora_dim": "actor_lora_dim", "lora_module_name": "actor_lora_module_name"}
    assert flags_of_adapters(given, "ppo", {}) == {renamed.get(name, name): value for name, value in flags.items()}
    assert flags_of_adapters(config(target_modules="all-linear"), "sft", {})["lora_module_name"] == "all-linear"
    flags_of_adapters(config(task_type="SEQ_CLS", modules_to_save=["score"]), "reward", {})


@pytest.mark.parametrize("targets", [["q_proj"], ["o_proj", "down_proj"], ["self_attn.k_proj"]])
def test_the_adapters_are_pefts(targets):
    """The same layers, scale and start, to the bit, as PEFT makes of the configuration itself."""
    given = config(target_modules=targets)
    flags = flags_of_adapters(given, "sft", {})
    torch.manual_seed(3)
    theirs = peft.get_peft_model(tiny_causal_lm("llama"), given).base_model.model
    torch.manual_seed(3)
    ours = add_lora(tiny_causal_lm("llama"), Lora(**flags))
    expected, made = (
        {name: weight for name, weight in model.named_parameters() if ".lora_" in name} for model in (theirs, ours)
    )
    assert expected.keys() == made.keys() and expected
    assert all(torch.equal(expected[name], made[name]) for name in expected)
    assert {module.scaling["default"] for module in ours.modules() if hasattr(module, "lora_A")} == {2.0}


KINDS = {
    "rslora": ("llama", {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}, 4.0),  # 8 over the root of 4
    "dora": ("llama", {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}, 2.0),
    "dora_transposed": ("gpt2", {"use_dora": True, "target_modules": ["c_attn", "c_proj"]}, 2.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_lora_merge_as_pefts(kind):
    family, fields, scale = KINDS[kind]
    settings = Lora(**flags_of_adapters(config(**fields), "sft", {}))
    plain = peft.get_peft_model(tiny_causal_lm(family), config(**fields, fan_in_fan_out=family == "gpt2"))
    plain, ours = plain.base_model.model, add_lora(tiny_causal_lm(family), settings)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for own, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            if own.requires_grad:
                theirs.copy_(torch.randn(own.shape, generator=drawn))
            own.copy_(theirs)
    assert {module.scaling["default"] for module in ours.modules() if hasattr(module, "lora_A")} == {scale}
    merged = dict(full_tensors(ours, 0))
    for name, module in plain.named_modules():
        if hasattr(module, "lora_A"):
            module.merge()
            torch.testing.assert_close(merged[f"{name}.weight"], module.base_layer.weight)


OTHERS = {
    "bias": "all", "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 2},
    "layers_to_transform": [0],
    "init_lora_weights": "gaussian", "exclude_modules": ["k_proj"], "alpha_pattern": {"q_proj": 2}, "lora_bias": True,
    "trainable_token_indices": [1], "layer_replication": [(0, 1)], "target_parameters": ["x"], "fan_in_fan_out": True,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_fields_are_refused_by_name(name):
    given = config()
    setattr(given, name, OTHERS[name])
    with pytest.raises(ThreestepError, match=rf"^peft_config\.{name} expects .*; leave it out$"):
        flags_of_adapters(given, "sft", {})


def test_every_field_that_differs_counts():
    """Also one that a later PEFT adds."""

    @dataclasses.dataclass
    class LoraConfig(peft.LoraConfig):
        new_field: int = 0

    flags_of_adapters(LoraConfig(target_modules=["q_proj"]), "sft", {})
    with pytest.raises(ThreestepError, match=r"^peft_config\.new_field expects 0, got 1"):
        flags_of_adapters(LoraConfig(target_modules=["q_proj"], new_field=1), "sft", {})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (config(target_modules=None), r"^peft_config.target_modules expects .* write it out, such as"),
        (config(target_modules=".*q"), r"got the pattern '\.\*q'; write the names as a list, or lora_module_name='"),
        (config(inference_mode=True), "^peft_config.inference_mode expects False, got True, which trains nothing$"),
        (config(task_type="SEQ_CLS"), "^peft_config.task_type expects CAUSAL_LM in sft, got SEQ_CLS; write task_type="),
        ({"r": 3}, "^peft_config expects a peft.LoraConfig, got dict; other adapters are not trained$"),
    ],
)
def test_mistakes(given, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        flags_of_adapters(given, "sft", {})


def test_flags_beside_it():
    with pytest.raises(ThreestepError, match="^peft_config and lora_dim say the same; leave one out$"):
        flags_of_adapters(config(), "sft", {"lora_dim": 3})
