"""LoRA: its flags and those of PEFT, which layers it adapts, what trains and is merged, and a shared trunk."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Glm4MoeConfig, MixtralConfig

from tests.support.lora_settings import lora_settings
from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import FAMILIES, tiny_causal_lm, tiny_scalar_model
from tests.support.two_roles import read_while_learning, trained
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.arguments import LoraArguments, RolesLoraArguments
from threestep.plugins.lora.checks import check
from threestep.plugins.lora.peft_settings import flags_of_adapters
from threestep.plugins.lora.preparers import Lora, preparers
from threestep.plugins.lora.shared_trunk import scalar_model_on_trunk
from training.step3_ppo.flags.checks import FORWARDS, VALUES, checked_components, why_apart
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.documents import join
from training.utils.engine.zero3 import full_tensors
from training.utils.flags.added import AddedFlags
from training.utils.flags.flags import note_mistakes
from training.utils.layout.rows import padded_rows
from training.utils.loading.models import prepared
from training.utils.models.own_forward import own_forward_of
from training.utils.models.token_model import PolicyModel, ScalarModel
from training.utils.models.weights import adapters_off

PATHS = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}


@dataclasses.dataclass(frozen=True)
class Given(AddedFlags):
    """Flags of a step."""

    own: LoraArguments | RolesLoraArguments


def mistakes_of(group) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(group, mistakes)
    return mistakes.sentences


def lora(role: str = "", **given) -> list[Lora]:
    return list(preparers(Given((RolesLoraArguments if role else LoraArguments)(**given)), role))


@pytest.mark.parametrize(
    ("group", "given", "sentence"),
    [
        (LoraArguments, {"lora_dim": -1}, "--lora_dim expects 0 or more, got -1"),
        (LoraArguments, {"lora_dropout": 1.0}, "--lora_dropout expects 0 or more and less than 1, got 1.0"),
        (LoraArguments, {"lora_learning_rate": 0.0}, "--lora_learning_rate expects more than 0, got 0.0"),
        (LoraArguments, {"use_rslora": True}, "--use_rslora "),
        (LoraArguments, {"use_dora": True}, "--use_dora adds magnitudes to LoRA's adapters, but this run has none"),
        (LoraArguments, {"use_dora": True, "use_rslora": True, "lora_dim": 4}, None),
        (RolesLoraArguments, {"critic_lora_dim": -2}, "--critic_lora_dim expects 0 or more, got -2"),
        (RolesLoraArguments, {"actor_lora_learning_rate": 0.0}, "--actor_lora_learning_rate expects more than 0"),
        (RolesLoraArguments, {"critic_lora_learning_rate": -1.0}, "--critic_lora_learning_rate expects more than 0"),
    ],
)
def test_mistakes(group, given, sentence):
    said = mistakes_of(group(**given))
    assert len(said) == (sentence is not None) and all(each.startswith(sentence) for each in said)


def test_every_setting_is_passed_on():
    given = {
        "lora_dim": 8, "lora_alpha": 3.0, "lora_dropout": 0.2, "lora_module_name": "x", "use_dora": True,
        "only_optimize_lora": False, "lora_learning_rate": 1e-3,
    }  # fmt: skip
    assert lora(**given) == [Lora(**given)] and {field.name for field in dataclasses.fields(Lora)} == given.keys()
    assert lora(lora_dim=2) == [Lora(2)]
    assert lora(lora_dropout=0.1) == lora("actor", critic_lora_dim=4) == list(preparers(AddedFlags(), "")) == []
    [made] = lora(lora_dim=16, lora_alpha=8.0, use_rslora=True)
    assert made.lora_alpha / made.lora_dim == 8.0 / 4.0  # by the root of the rank


def test_each_role_gets_its_own_settings():
    shared = {"lora_alpha": 9.0, "lora_dropout": 0.01, "only_optimize_lora": False}
    given = {
        **shared, "actor_lora_dim": 7, "critic_lora_dim": 8, "actor_lora_module_name": "x",
        "critic_lora_module_name": "y", "actor_lora_learning_rate": 1e-3, "critic_lora_learning_rate": 2e-3,
    }  # fmt: skip
    assert lora("actor", **given) == [Lora(7, lora_module_name="x", lora_learning_rate=1e-3, **shared)]
    assert lora("critic", **given) == [Lora(8, lora_module_name="y", lora_learning_rate=2e-3, **shared)]
    flags = ppo_flags(**PATHS, **given)
    assert [flags.model(role).preparers[0].lora_dim for role in ("actor", "critic")] == [7, 8]


@pytest.mark.parametrize("name", [FORWARDS, VALUES])
def test_dropout_before_adapters_keeps_forwards_apart(name):
    one_step = {"num_samples_per_prompt": 2, "per_device_training_batch_size": 32, "reward": "model:1.0"}
    flags = ppo_flags(**PATHS, **one_step, lora_dropout=0.1)
    said = "reads and trains in one forward, so --lora_dropout 0.1 would change"
    assert (why_apart(name, flags, checked_components(flags).algorithm) or "").startswith(f"true {said}")
    with pytest.raises(ThreestepError, match=f"--{name} {said} .*; use --lora_dropout 0"):
        checked_components(ppo_flags(**PATHS, **one_step, lora_dropout=0.1, **{name: True}))
    flags = ppo_flags(**PATHS, **one_step, share_trunk=True, actor_lora_dim=4, critic_lora_dim=2)
    said = why_apart(VALUES, flags, checked_components(flags).algorithm)
    assert said == "actor and critic share a trunk (--share_trunk)"


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


MERGED_KINDS = {
    "rslora": ("llama", {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}, 4.0),  # 8 over the root of 4
    "dora": ("llama", {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}, 2.0),
    "dora_transposed": ("gpt2", {"use_dora": True, "target_modules": ["c_attn", "c_proj"]}, 2.0),
}


@pytest.mark.parametrize("kind", MERGED_KINDS)
def test_kinds_of_lora_merge_as_pefts(kind):
    family, fields, scale = MERGED_KINDS[kind]
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
    with pytest.raises(ThreestepError, match=rf"^peft_config\.{name} expects .*; remove it$"):
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
    ("given", "beside", "sentence"),
    [
        (config(target_modules=None), {}, r"^peft_config.target_modules expects .* list them, such as"),
        (
            config(target_modules=".*q"),
            {},
            r"got the pattern '\.\*q'; write the names as a list, or use lora_module_name",
        ),
        (config(inference_mode=True), {}, "^peft_config.inference_mode expects False, got True, which trains nothing$"),
        (config(task_type="SEQ_CLS"), {}, "^peft_config.task_type expects CAUSAL_LM in sft, got SEQ_CLS; set"),
        ({"r": 3}, {}, "^peft_config expects a peft.LoraConfig, got dict; other adapter kinds are not supported$"),
        (config(), {"lora_dim": 3}, "^peft_config and lora_dim set the same thing; remove one$"),
    ],
)
def test_mistakes_of_pefts_settings(given, beside, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        flags_of_adapters(given, "sft", beside)


LORA = Lora(lora_dim=4, lora_alpha=6.0)
IDS = torch.arange(3, 15)[None]


def with_adapters(family: str = "llama", settings: Lora = LORA, scalar: bool = False):
    return with_drawn_adapters(add_lora((tiny_scalar_model if scalar else tiny_causal_lm)(family), settings).eval())


_SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts_per_tok": 2,
}  # fmt: skip


_SHARED_EXPERT = dict(n_routed_experts=4, moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=0)


EXPERTS = {
    "routed": MixtralConfig(**_SHAPE, num_local_experts=4),
    "shared": Glm4MoeConfig(**_SHAPE, **_SHARED_EXPERT, head_dim=16),
}


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


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_and_routers_get_no_adapter(kind):
    """They are weights of no linear layer: PEFT's own "all-linear" wraps them twice, and a merge would miss them."""

    def made() -> Any:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(EXPERTS[kind]).eval()

    model = with_drawn_adapters(add_lora(made(), LORA))
    assert adapted_layers(model) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not [name for name, _ in model.named_parameters() if "experts.base_layer" in name]
    merged = {name: tensor.clone() for name, tensor in full_tensors(model, zero_stage=0)}
    fresh = made()
    assert merged.keys() == fresh.state_dict().keys()
    fresh.load_state_dict(merged)
    assert not torch.allclose(logits(fresh), logits(made()), atol=1e-3)
    torch.testing.assert_close(logits(fresh), logits(model), rtol=1e-4, atol=1e-5)


def adapted_layers(model: Any) -> set[str]:
    return {name.split(".lora_")[0].split(".")[-1] for name, _ in model.named_parameters() if "lora_" in name}


def with_drawn_adapters(model: Any, seed: int = 1) -> Any:
    """The model with adapters that are not zero: PEFT starts them so that they change nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def test_layers_that_peft_refuses_or_that_are_not_called_get_no_adapter():
    """Mamba's own forward multiplies by `dt_proj.weight` itself."""
    model = add_lora(tiny_causal_lm("mamba"), LORA)
    assert adapted_layers(model) == {"in_proj", "x_proj"}
    [past, refused] = own_forward_of(model).notes
    assert past == "no adapters on 2 layers (dt_proj): the family reads the weight without calling the layer"
    assert refused == "no adapters on 2 layers (out_proj): PEFT refuses it, or treats it as an expert layer"
    with pytest.raises(
        ThreestepError, match=r"^--lora_module_name 'out_proj': no adapters on 2 layers \(out_proj\): PEFT"
    ):
        add_lora(tiny_causal_lm("mamba"), Lora(lora_dim=4, lora_module_name="out_proj"))


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
        "no adapters on 1 layer (gate_proj): it is not a plain linear layer",
        "no adapters on 2 layers (up_proj): the weight is shared with another layer",
    ]


def test_adapters_off_is_the_model_as_it_was():
    model, plain = with_adapters(), logits(tiny_causal_lm("llama"))
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    adapted = logits(model)
    with pytest.raises(RuntimeError, match="inside"), adapters_off(model):
        assert torch.equal(logits(model), plain)
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
        raise RuntimeError("inside")
    assert torch.equal(logits(model), adapted)
    assert torch.equal(logits(add_lora(tiny_causal_lm("llama"), LORA)), plain)  # new ones change nothing


def test_only_the_adapters_and_a_scalar_head_train_unless_all_may():
    model = with_adapters()
    PolicyModel(model)(padded_rows([join(IDS[0, :4], IDS[0, 4:])], 0)).logprobs_M.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert (parameter.grad is not None) == ("lora_" in name), name
    scalar = with_adapters(scalar=True)
    trained = {name for name, parameter in scalar.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"score.weight"}
    model = with_adapters(settings=Lora(lora_dim=4, only_optimize_lora=False))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "part", "wanted"),
    [
        ("llama", "layers.1.self_attn", {f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"}),
        ("llama", "q_proj,v_proj", {f"model.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qv"}),
        # Its linear layers are Conv1D, which DeepSpeed-Chat's LoRA never matched.
        (
            "gpt2",
            "h.0.",
            {f"transformer.h.0.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
        ),
    ],
)
def test_parts_of_names_choose_the_layers(family, part, wanted):
    model = with_adapters(family, Lora(lora_dim=4, lora_module_name=part))
    assert {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name} == wanted
    for wrong in ("q_proj,query", "query"):
        with pytest.raises(ThreestepError, match="a linear layer's name in .*got 'query'$"):
            with_adapters(settings=Lora(lora_dim=4, lora_module_name=wrong))


def test_only_the_adapters_train():
    model = with_adapters()
    PolicyModel(model)(padded_rows([join(IDS[0, :4], IDS[0, 4:])], 0)).logprobs_M.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert (parameter.grad is not None) == ("lora_" in name), name


def test_a_part_of_the_names_chooses_the_layers():
    model = with_adapters(settings=Lora(lora_dim=4, lora_module_name="layers.1.self_attn"))
    adapted = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted == {f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"}


def test_checkpointed_blocks_still_train_their_adapters():
    model = tiny_causal_lm("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = add_lora(model, Lora(lora_dim=4))
    model(IDS, use_cache=False).logits.square().mean().backward()
    second = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in second)


TWO_ROWS = padded_rows([join(torch.tensor(p), torch.tensor(r)) for p, r in (([5, 9], [3, 4, 7]), ([8], [6, 3]))], 0)
ACTOR, CRITIC = lora_settings("", lora_dim=3), lora_settings("", lora_dim=2, lora_alpha=6.0)


def drawn(model, seed: int):
    """What trains, also what starts with 0, drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


def shared(family: str):
    actor = tiny_causal_lm(family, torch.float64)
    critic = scalar_model_on_trunk(actor, CRITIC, pad_token_id=1)
    return prepared(actor, ACTOR), critic.eval()


def apart(family: str):
    """The same without anything in common."""
    actor = tiny_causal_lm(family, torch.float64)
    config = copy.deepcopy(actor.config)
    config.num_labels = 1
    critic = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64).eval()
    critic.base_model.load_state_dict(actor.base_model.state_dict())
    return prepared(actor, ACTOR), prepared(critic, CRITIC)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_reads_and_learns_as_two_separate_models_do(family):
    """A few steps of Adam on both losses, in float64: equal to the last bit, as the sums are the same ones."""
    numbers, weights = [], []
    for make in (shared, apart):
        actor, critic = make(family)
        drawn(actor, 1), drawn(critic, 2)
        numbers.append(read_while_learning(actor, critic, TWO_ROWS, steps=3))
        weights.append([*trained(actor).values(), *trained(critic).values()])
    assert all(one.equal(other) for one, other in zip(*numbers, strict=True))
    assert all(one.equal(other) for one, other in zip(*weights, strict=True))
    references = numbers[0][0::3]
    assert all(read.equal(references[0]) for read in references)
    assert not numbers[0][1].equal(numbers[0][4]) and not numbers[0][2].equal(numbers[0][5])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trunk_is_there_once_and_all_that_trains_is_of_one_model(family):
    actor, critic = shared(family)
    frozen = {weight.data_ptr() for weight in actor.base_model.parameters() if not weight.requires_grad}
    assert {weight.data_ptr() for weight in critic.base_model.parameters() if not weight.requires_grad} == frozen
    theirs = [{weight.data_ptr() for weight in trained(model).values()} for model in (actor, critic)]
    assert not theirs[0] & theirs[1] and not (theirs[0] | theirs[1]) & frozen
    assert all(".lora_" in name or name.startswith("score.") for name in trained(critic)) and "score.weight" in trained(
        critic
    )
    assert critic.base_model.config is critic.config is not actor.config


def test_a_new_critic_values_everything_at_0():
    _, critic = shared("llama")
    assert ScalarModel(critic)(TWO_ROWS, at="targets").eq(0).all()
    assert (critic.config.num_labels, critic.config.pad_token_id) == (1, 1)


def test_each_model_has_dropout_of_its_own():
    actor = tiny_causal_lm("gpt2")
    critic = scalar_model_on_trunk(actor, lora_settings("", lora_dim=2, dropout=0.5), pad_token_id=1)
    rates = [{m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} for model in (actor, critic)]
    assert rates == [{0.0}, {0.5}]


def test_a_family_without_a_scalar_head():
    model = tiny_causal_lm("mamba")
    with pytest.raises(ThreestepError, match="--share_trunk: transformers has no scalar head for the trunk of"):
        scalar_model_on_trunk(model, CRITIC, pad_token_id=1)


TWO_RANKS = {"actor_lora_dim": 4, "critic_lora_dim": 2}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (TWO_RANKS, None),
        ({**TWO_RANKS, "actor_zero_stage": 2, "critic_zero_stage": 1, "offload": True}, None),
        ({**TWO_RANKS, "actor_zero_stage": 3, "critic_zero_stage": 3}, None),
        (
            {**TWO_RANKS, "critic_zero_stage": 3},
            "ZeRO-3 shards .*--actor_zero_stage is 0 and --critic_zero_stage is 3; use",
        ),
        ({"actor_lora_dim": 4}, "adapters .* on one frozen trunk, but --critic_lora_dim is 0; set it to 1 or more"),
        ({"critic_lora_dim": 4}, "adapters .* on one frozen trunk, but --actor_lora_dim is 0; set it to 1 or more"),
        ({**TWO_RANKS, "only_optimize_lora": False}, "keeps the trunk frozen, but --only_optimize_lora false trains"),
        ({**TWO_RANKS, "use_dora": True}, "with --use_dora is untested, because two models would"),
    ],
)
def test_mistakes_of_a_shared_trunk(given, sentence):
    mistakes = Mistakes()
    check(ppo_flags(actor_model_name_or_path="a", share_trunk=True, **given), mistakes)
    assert len(mistakes.sentences) == (sentence is not None)
    assert all(re.match(f"--share_trunk.* ?{sentence}", said) for said in mistakes.sentences)


def names_of(critic: str, reward: str, advantage: str = "gae"):
    paths = {"actor_model_name_or_path": "a", "critic_model_name_or_path": critic}
    flags = ppo_flags(
        **paths, **TWO_RANKS, share_trunk=True, num_samples_per_prompt=2, advantage=advantage, reward=reward
    )
    return checked_components(flags)


def test_the_critics_path_is_the_reward_models_alone():
    assert not names_of("", "gsm8k").with_critic_tokenizer
    assert names_of("c", "model").with_critic_tokenizer
    with pytest.raises(
        ThreestepError, match="^no reward is set; .* or set --critic_model_name_or_path to a reward model"
    ):
        names_of("", "model")
    with pytest.raises(ThreestepError, match="needs a critic, but --advantage rloo uses none; drop"):
        names_of("c", "model", "rloo")
