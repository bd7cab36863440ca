"""LoRA: what trains, what is merged, and what is there with the adapters off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import join
from training.utils.engine.zero3 import full_tensors
from training.utils.layout.rows import padded_rows
from training.utils.models.own_forward import own_forward_of
from training.utils.models.token_model import PolicyModel
from training.utils.models.weights import adapters_off

LORA = Lora(lora_dim=4, lora_alpha=6.0)
IDS = torch.arange(3, 15)[None]


def with_adapters(family: str = "llama", settings: Lora = LORA, scalar: bool = False, seed: int = 1):
    """A model whose adapters are not zero: PEFT starts them so that they change nothing."""
    make = tiny_scalar_model if scalar else tiny_causal_lm
    model = add_lora(make(family), settings).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3", "gemma3_text"])
def test_the_merged_weights_are_the_plain_model_and_peft_own_merge(family):
    model = with_adapters(family)
    plain = tiny_causal_lm(family)
    assert not torch.allclose(logits(model), logits(plain), atol=0.1)
    merged = {name: tensor.clone() for name, tensor in full_tensors(model, zero_stage=0)}
    named = dict(plain.named_parameters())
    assert set(named) <= set(merged) and not any("lora" in name or "base_layer" in name for name in merged)

    peft = get_peft_model(
        tiny_causal_lm(family), LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    ours = {name.replace(".default", ""): tensor for name, tensor in model.named_parameters() if "lora_" in name}
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): tensor
        for name, tensor in peft.named_parameters()
        if "lora_" in name
    }
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, tensor in theirs.items():
            tensor.copy_(ours[name])
    for name, tensor in peft.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged[name], tensor)

    fresh = tiny_causal_lm(family)
    fresh.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(fresh), logits(model), rtol=1e-4, atol=1e-4)


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def test_experts_and_routers_get_no_adapter():
    """They are weights of no linear layer: PEFT's own "all-linear" wraps them twice, and a merge would miss them."""
    model = add_lora(mixtral(), LORA)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    adapted = {name.split(".lora_")[0].split(".")[-1] for name, _ in model.named_parameters() if "lora_" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    merged = {name: tensor.clone() for name, tensor in full_tensors(model, zero_stage=0)}
    fresh = mixtral()
    assert merged.keys() == fresh.state_dict().keys()
    fresh.load_state_dict(merged)
    assert not torch.allclose(logits(fresh), logits(mixtral()), atol=1e-3)
    torch.testing.assert_close(logits(fresh), logits(model), rtol=1e-4, atol=1e-5)


def adapted_layers(model: Any) -> set[str]:
    return {name.split(".lora_")[0].split(".")[-1] for name, _ in model.named_parameters() if "lora_" in name}


def test_layers_that_peft_refuses_or_that_are_not_called_get_no_adapter():
    """Mamba's own forward multiplies by `dt_proj.weight` itself."""
    model = add_lora(tiny_causal_lm("mamba"), LORA)
    assert adapted_layers(model) == {"in_proj", "x_proj"}
    [past, refused] = own_forward_of(model).notes
    assert past == "no adapters on 2 layers (dt_proj): the family reads the weight without calling the layer"
    assert refused == "no adapters on 2 layers (out_proj): PEFT refuses it, or takes it for a layer of experts"
    with pytest.raises(
        ThreestepError, match=r"^--lora_module_name 'out_proj': no adapters on 2 layers \(out_proj\): PEFT"
    ):
        add_lora(tiny_causal_lm("mamba"), Lora(lora_dim=4, lora_module_name="out_proj"))


def test_layers_that_peft_takes_for_experts_get_no_adapter():
    """Shared experts: PEFT would adapt the experts' tensors in their place, which no merge here knows."""
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
        first_k_dense_replace=0, head_dim=16,
    )  # fmt: skip
    model = add_lora(Glm4MoeForCausalLM(config).eval(), LORA)
    assert adapted_layers(model) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not [name for name, _ in model.named_parameters() if "experts.base_layer" in name]


class Odd(nn.Linear):
    """A linear layer by its class alone."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).abs()


def test_layers_that_are_not_linear_or_share_their_weight_get_no_adapter():
    model = tiny_causal_lm("llama")
    first, second = (layer.mlp for layer in model.model.layers[:2])
    odd = Odd(first.gate_proj.in_features, first.gate_proj.out_features, bias=False)
    odd.weight, first.gate_proj = first.gate_proj.weight, odd
    second.up_proj.weight = first.up_proj.weight
    model = add_lora(model, LORA)
    assert own_forward_of(model).notes == [
        "no adapters on 1 layer (gate_proj): it computes something else than a linear layer",
        "no adapters on 2 layers (up_proj): the weight is shared with another layer",
    ]


def test_adapters_off_is_the_model_as_it_was():
    model = with_adapters()
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    adapted = logits(model)
    with adapters_off(model):
        assert torch.equal(logits(model), logits(tiny_causal_lm("llama")))
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert torch.equal(logits(model), adapted)


def test_adapters_come_back_after_an_error():
    model = with_adapters()
    adapted = logits(model)
    with pytest.raises(RuntimeError), adapters_off(model):
        raise RuntimeError
    assert torch.equal(logits(model), adapted)


def test_new_adapters_change_nothing():
    assert torch.equal(logits(add_lora(tiny_causal_lm("llama"), LORA)), logits(tiny_causal_lm("llama")))


def test_only_the_adapters_train():
    model = with_adapters()
    PolicyModel(model)(padded_rows([join(IDS[0, :4], IDS[0, 4:])], 0)).logprobs_M.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert (parameter.grad is not None) == ("lora_" in name), name


def test_everything_may_train_beside_the_adapters():
    model = with_adapters(settings=Lora(lora_dim=4, only_optimize_lora=False))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_scalar_head_always_trains_and_gets_no_adapter():
    model = with_adapters(scalar=True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "score.weight" in trained
    assert all("lora_" in name for name in trained - {"score.weight"})


def test_a_part_of_the_names_chooses_the_layers():
    model = with_adapters(settings=Lora(lora_dim=4, lora_module_name="layers.1.self_attn"))
    adapted = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted == {f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"}


def test_several_parts_choose_the_layers_of_each():
    model = with_adapters(settings=Lora(lora_dim=4, lora_module_name="q_proj,v_proj"))
    adapted = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj", "v_proj"} and len(adapted) == 4
    with pytest.raises(ThreestepError, match="got 'query'$"):
        with_adapters(settings=Lora(lora_dim=4, lora_module_name="q_proj,query"))


def test_gpt2s_own_linear_layers_can_be_named():
    """They are Conv1D, which DeepSpeed-Chat's LoRA never matched."""
    model = with_adapters("gpt2", Lora(lora_dim=4, lora_module_name="h.0."))
    adapted = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted == {f"transformer.h.0.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}


def test_a_name_that_no_layer_has():
    with pytest.raises(ThreestepError, match="names of linear layers in LlamaForCausalLM.*got 'decoder.layers.'"):
        add_lora(tiny_causal_lm("llama"), Lora(lora_dim=4, lora_module_name="decoder.layers."))


def test_checkpointed_blocks_still_train_their_adapters():
    model = tiny_causal_lm("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = add_lora(model, Lora(lora_dim=4))
    model(IDS, use_cache=False).logits.square().mean().backward()
    second = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in second)
