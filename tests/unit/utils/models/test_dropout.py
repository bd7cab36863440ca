"""Dropout rates, in the configuration and in the modules, under all names that families give them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.families.builds import draw_weights
from tests.families.configs import tiny_config
from tests.support.lora_settings import lora_settings
from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.errors import ThreestepError
from training.utils.loading.models import prepared
from training.utils.models.dropout import check_no_dropout, set_dropout
from training.utils.models.own_forward import current_difference, read_own_forward
from training.utils.models.settings import ModelSettings

RATE = 0.3
# Each has names or modules that others lack: layer drop, embedding, residual, activation, hidden and probability rates,
# rates in a nested configuration, in modules' attributes, jitter of routers under two names.
KINDS = (
    "gpt2", "opt", "bloom", "bart", "biogpt", "blenderbot", "codegen", "ctrl", "dbrx", "doge", "gpt_bigcode", "gpt_neo",
    "llama4_text", "minimax", "mixtral", "seed_oss", "starcoder2", "xglm",
)  # fmt: skip


def raise_rates(held: Any) -> Any:
    """Raise every float below 1 whose name mentions it, of a configuration (its parts too) or a model; return it. By
    another way than the code's: any name with `drop` or `jitter` in it."""
    owners = list(held.modules()) if isinstance(held, torch.nn.Module) else [held]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if isinstance(value, PreTrainedConfig):
                raise_rates(value)
            elif ("drop" in name or "jitter" in name) and type(value) is float and 0 <= value < 1:
                setattr(owner, name, RATE)
        if isinstance(owner, torch.nn.Dropout):
            owner.p = RATE
    return held


def noisy(family: str) -> Any:
    model = AutoModelForCausalLM.from_config(raise_rates(copy.deepcopy(tiny_config(family))), dtype=torch.float32)
    draw_weights(model, seed=0)
    return raise_rates(model).eval()


@pytest.mark.parametrize("family", KINDS)
def test_no_noise_is_left_under_any_name(family):
    model = noisy(family)
    own = read_own_forward(model)
    assert max(current_difference(model, own, training=True) for _ in range(3)) > own.tolerance
    set_dropout(model, 0.0)
    assert max(current_difference(model, own, training=True) for _ in range(3)) <= own.tolerance


def test_a_rate_is_of_dropout_alone():
    model = tiny_causal_lm("gpt2", embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1, summary_first_dropout=0.1)
    layer = model.transformer.h[0]
    layer.layerdrop, layer.router_jitter_noise, layer.drop_path_rate, layer.attn_dropout_p = 0.1, 0.1, 0.1, 0.1
    set_dropout(model, RATE)
    assert (layer.layerdrop, layer.router_jitter_noise, layer.drop_path_rate) == (0.1, 0.1, 0.1)
    assert layer.attn_dropout_p == model.config.embd_pdrop == layer.attn.attn_dropout.p == RATE
    assert model.config.summary_first_dropout == 0.1
    set_dropout(model, 0.0)
    assert (layer.layerdrop, layer.router_jitter_noise, layer.drop_path_rate, layer.attn_dropout_p) == (0, 0, 0, 0)


def test_what_merely_sounds_like_it_stays():
    model = tiny_causal_lm("llama")
    layer = model.model.layers[0]
    others = {
        "use_dropout": True, "dropout_layers": 3, "num_dropout": 2.0, "dropout_mode": "all", "drop_tokens": 0.5,
        "dropout_temperature": 0.7, "dropout_start_step": 0.5, "classifier_dropout": None,
    }  # fmt: skip
    for owner in (layer, model.config):
        for name, value in others.items():
            setattr(owner, name, value)
    for rate in (RATE, 0.0):
        set_dropout(model, rate)
        for owner in (layer, model.config):
            assert {name: getattr(owner, name) for name in others} == others


def test_classes_of_the_models_own():
    """As timm's DropPath, and as families that wrote their own dropout."""

    class DropPath(torch.nn.Module):
        drop_prob = 0.0

    class StableDropout(torch.nn.Module):
        drop_prob = 0.0

    model = tiny_causal_lm("llama")
    layer = model.model.layers[0]
    layer.path, layer.stable = DropPath(), StableDropout()
    layer.path.drop_prob = layer.stable.drop_prob = 0.2
    set_dropout(model, RATE)
    assert (layer.path.drop_prob, layer.stable.drop_prob) == (0.2, RATE)
    set_dropout(model, 0.0)
    assert (layer.path.drop_prob, layer.stable.drop_prob) == (0.0, 0.0)


def test_adapters_have_a_setting_of_their_own():
    settings = lora_settings("", lora_dim=2, lora_dropout=0.2, dropout=0.0, gradient_checkpointing=True)
    model = prepared(tiny_causal_lm("gpt2", resid_pdrop=0.1), settings)
    set_dropout(model, 0.0)
    of_lora = {module.p for name, module in model.named_modules() if name.endswith("lora_dropout.default")}
    assert of_lora == {0.2} and model.transformer.h[0].mlp.dropout.p == 0.0


def test_noise_under_no_name_is_refused():
    """Known by what it computes: no dropout flag reaches it."""
    model = tiny_causal_lm("llama")
    model.model.norm.register_forward_hook(
        lambda module, inputs, output: torch.nn.functional.dropout(output, 0.2, module.training)
    )
    prepared(model, ModelSettings(""))
    with pytest.raises(ThreestepError, match="LlamaForCausalLM computes something else in train mode with dropout 0: "):
        prepared(model, ModelSettings("", dropout=0.0, gradient_checkpointing=True))


def test_what_a_model_computes_with_in_eval_mode_stays():
    """PhiMoE's "jitter" is the width of a mask over its experts, also in eval mode; in train mode it draws besides."""
    model = AutoModelForCausalLM.from_config(tiny_config("phimoe"))
    draw_weights(model, seed=0)
    own = read_own_forward(model.eval())
    with pytest.raises(ThreestepError, match=r"^PhimoeForCausalLM computes something else in train mode with dropout"):
        prepared(model, ModelSettings("m", dropout=0.0))
    assert model.config.router_jitter_noise == 0.1 and model.config.attention_dropout == 0.0
    assert own.notes == [
        "router_jitter_noise stays as it is: without it the model computes something else in eval mode too"
    ]


def test_noise_that_rounding_would_explain_is_still_noise():
    """In half precision the tolerance is wide; a CPU rounds the same numbers alike."""
    model = tiny_causal_lm("llama")
    own = read_own_forward(model)
    model._threestep_own_forward = replace(own, tolerance=100.0)
    check_no_dropout(model)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(ThreestepError, match=r"^LlamaForCausalLM draws at random in train mode with dropout 0; leave"):
        check_no_dropout(model)
