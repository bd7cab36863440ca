"""Adapters on their base: merged into what PEFT computes, or trained on; whatever does not fit is refused by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.lora_settings import lora_settings
from training.utils.base.errors import ThreestepError
from training.utils.loading.models import load_causal_lm, load_scalar_model
from training.utils.loading.tokenizers import load_tokenizer
from training.utils.models.own_forward import own_forward_of
from training.utils.models.settings import ModelSettings

IDS = torch.arange(3, 33)[None]
BASE = "base_model_name_or_path"
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(**LORA),
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "ranks": lambda: peft.LoraConfig(**LORA, use_rslora=True, rank_pattern={"q_proj": 2}),
    "embeddings": lambda: peft.LoraConfig(**{**LORA, "target_modules": ["embed_tokens", "lm_head"]}),
    "whole_head": lambda: peft.LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "boft": lambda: peft.BOFTConfig(boft_block_size=8, target_modules=["q_proj"], init_weights=False),
}


@pytest.fixture
def adapter(save_folder, tmp_path) -> Callable[..., tuple[str, Any]]:
    """Save an adapter of a tiny model with random values; returns its folder and PEFT's own model."""

    def save(config: Any, scalar: bool = False, labels: int = 1, **changes: Any) -> tuple[str, Any]:
        base, folder = save_folder(**changes), str(tmp_path / "adapter")
        model: Any = AutoModelForCausalLM.from_pretrained(base)
        if scalar:
            model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels, pad_token_id=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = peft.get_peft_model(model, config)
            torch.manual_seed(0)
            for weight in adapted.parameters():
                if weight.requires_grad:
                    weight.data += 0.1 * torch.randn_like(weight)
            adapted.save_pretrained(folder)
        return folder, adapted.eval()

    return save


def load(folder: str, dtype: torch.dtype = torch.float32, **settings: Any):
    return load_causal_lm(lora_settings(folder, **settings), dtype, len(load_tokenizer(folder)))


def load_reward(folder: str, must_have_head: bool = True):
    return load_scalar_model(
        ModelSettings(folder), torch.float32, load_tokenizer(folder), must_have_head=must_have_head
    )


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS, use_cache=False).logits


def rewritten(folder: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = Path(folder, "adapter_model.safetensors")
    save_file(change(load_file(file)), file, {"format": "pt"})


def settings_of(folder: str, **changes: Any) -> None:
    file = Path(folder, "adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_it_computes_what_peft_does(adapter, kind, capsys):
    folder, theirs = adapter(KINDS[kind]())
    before = torch.get_rng_state()
    model = load(folder)
    assert torch.equal(torch.get_rng_state(), before)  # a run draws what it draws with the merged model
    plain = AutoModelForCausalLM.from_pretrained(str(Path(folder).parent / "model"))
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(model), logits(plain), atol=0.1)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(weight.requires_grad for weight in model.parameters()) and not hasattr(model, "peft_config")
    assert f"model: merged adapter '{folder}' into base '{Path(folder).parent / 'model'}'\n" in capsys.readouterr().out


def test_merged_into_a_base_in_half_precision(adapter):
    folder, theirs = adapter(KINDS["lora"]())
    model = load(folder, torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    own = load_file(Path(folder).parent / "model" / "model.safetensors")
    merged = theirs.merge_and_unload()
    for name, weight in model.named_parameters():
        rounded = own[name].bfloat16().float() + merged.get_parameter(name).data - own[name]
        torch.testing.assert_close(weight.float(), rounded, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("config", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_half_of_a_tied_pair_is_refused(adapter, config):
    folder, _ = adapter(peft.LoraConfig(**{**LORA, **config}), tie_word_embeddings=True)
    if "target_modules" in config:  # PEFT saves the base's embeddings beside it
        rewritten(folder, lambda tensors: {name: value for name, value in tensors.items() if "lora_" in name})
    words = "(merging this adapter .kind LORA. into .* changes the output by|ties to it; merge the adapter with PEFT)"
    with pytest.raises(ThreestepError, match=words):
        load(folder)


@pytest.mark.parametrize(("kind", "name"), [("lora", "q_proj.lora_A.weight"), ("ia3", "k_proj.ia3_l")])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tensors, name: tensors.pop(name),
            "has .* tensors that adapter_config.json requires .*, and lacks the tensor {name};",
        ),
        (
            lambda tensors, name: tensors.update(other=torch.ones(1)),
            "has the tensor other, which adapter_config.json does not define for LlamaForCausal",
        ),
        (
            lambda tensors, name: tensors.update({name: torch.ones(3, 7)}),
            r"{name} expects the shape \[.*\] of '.*model' and adapter_config.json, got \[3, 7\]; use the base",
        ),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_tensors_that_do_not_fit(adapter, kind, name, change, words):
    folder, _ = adapter(KINDS[kind]())
    name = f"base_model.model.model.layers.0.self_attn.{name}"
    rewritten(folder, lambda tensors: (change(tensors, name), tensors)[1])
    with pytest.raises(ThreestepError, match=words.format(name=name)) as mistake:
        load(folder)
    assert folder in str(mistake.value) and "\n" not in str(mistake.value)


def test_another_base_than_it_was_trained_on(adapter, save_folder):
    folder, _ = adapter(KINDS["lora"]())
    for changed, words in [
        (
            {BASE: save_folder("other", family="opt")},
            "has 8 tensors, .* which adapter_config.json does not define for OPTForCausalLM .* use the base",
        ),
        (
            {BASE: save_folder("deep", num_hidden_layers=3)},
            "has 8 of the 12 tensors .*, and lacks 4 tensors, such as .*layers.2",
        ),
        ({"target_modules": ["no_such_layer"]}, "adapter of kind LORA, which PEFT cannot merge into LlamaForCausalLM"),
    ]:
        settings_of(folder, **changed)
        with pytest.raises(ThreestepError, match=words):
            load(folder)


def reward(**config: Any) -> Any:
    return peft.LoraConfig(**{**LORA, **config}, task_type="SEQ_CLS")


def test_a_reward_model_with_its_head(adapter, capsys):
    """PEFT saves the head of a classifier whole, beside the adapters."""
    folder, theirs = adapter(reward(), scalar=True)
    saved = load_file(f"{folder}/adapter_model.safetensors")["base_model.model.score.weight"]
    for must_have_head in (True, False):
        model = load_reward(folder, must_have_head)
        assert torch.equal(model.score.weight, saved)
        torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-4, atol=1e-4)
        assert "drawn at random" not in capsys.readouterr().out
    adapter(reward(), scalar=True, labels=2)
    with pytest.raises(ThreestepError, match=r"score.weight expects the shape \[1, 32\] .* got \[2, 32\]"):
        load_reward(folder)


def test_a_reward_model_without_its_head(adapter, capsys):
    folder, _ = adapter(peft.LoraConfig(**LORA), scalar=True)
    with pytest.raises(
        ThreestepError, match=f"'{folder}': expected a model for sequence classification, got LlamaForC"
    ):
        load_reward(folder)
    load_reward(folder, must_have_head=False)
    assert "initialized at random: score.weight" in capsys.readouterr().out


def test_a_language_models_adapter_under_a_new_head(adapter):
    """What adapts the output head is left out, as the head is."""
    folder, theirs = adapter(peft.LoraConfig(**{**LORA, "target_modules": ["q_proj", "lm_head"]}))
    model, merged = load_reward(folder, must_have_head=False), theirs.merge_and_unload()
    torch.testing.assert_close(
        model.base_model.layers[1].self_attn.q_proj.weight, merged.model.layers[1].self_attn.q_proj.weight
    )
    with pytest.raises(ThreestepError, match="does not define for LlamaForCausalLM of "):
        settings_of(folder, target_modules=["q_proj"])
        load(folder)


OWN = {"lora_dim": 4, "lora_alpha": 8.0, "lora_module_name": "_proj", "trains_adapter_on": True}
ALL = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]


def test_the_runs_own_lora_is_trained_on(adapter, capsys):
    folder, theirs = adapter(peft.LoraConfig(**{**LORA, "target_modules": ALL}))
    model = load(folder, **OWN, dropout=0.0, lora_dropout=0.25)
    assert f"model: continuing to train adapter '{folder}' of base '" in capsys.readouterr().out
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-4, atol=1e-4)
    tensors = load_file(f"{folder}/adapter_model.safetensors")
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    names = {"base_model.model." + name.replace(".default", ""): weight for name, weight in trained.items()}
    assert names.keys() == tensors.keys() and all(torch.equal(names[name], tensors[name]) for name in tensors)
    own = own_forward_of(model)
    assert own is not None and model.peft_config["default"].lora_dropout == 0.25
    rates = [part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)]
    assert len(rates) == 14 and set(rates) == {0.25}


@pytest.mark.parametrize(
    "others",
    [
        {"lora_dim": 8, "lora_alpha": 16.0},
        {"lora_alpha": 16.0},
        {"lora_module_name": "q_proj"},
        {"trains_adapter_on": False},
    ],
)
def test_another_lora_starts_anew_on_the_merged_model(adapter, capsys, others):
    folder, theirs = adapter(peft.LoraConfig(**{**LORA, "target_modules": ALL}))
    model = load(folder, **{**OWN, **others})
    said = capsys.readouterr().out
    assert "model: merged adapter" in said and "going on" not in said
    assert (("; the run's own LoRA has different settings and starts from new adapters") in said) == (
        "trains_adapter_on" not in others
    )
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-4, atol=1e-4)
    second = [weight for name, weight in model.named_parameters() if "lora_B" in name]
    assert second and not any(weight.any() for weight in second)


def test_other_kinds_of_lora_are_not_trained_on(adapter, capsys):
    """DoRA of the same layers and rank, unless the run's is DoRA too."""
    folder, theirs = adapter(peft.LoraConfig(**{**LORA, "target_modules": ALL}, use_dora=True))
    load(folder, **OWN)
    assert "model: merged adapter" in capsys.readouterr().out
    model = load(folder, **OWN, use_dora=True)
    assert "model: continuing to train adapter" in capsys.readouterr().out
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-4, atol=1e-4)


WHOLE_HEAD = {"modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (
            WHOLE_HEAD,
            lambda tensors: {name: value for name, value in tensors.items() if "lm_head" not in name},
            "lacks the tensor lm_head.weight, which modules_to_save in its adapter_con",
        ),
        (
            WHOLE_HEAD,
            lambda tensors: {name: torch.ones(7, 32) if "lm_head" in name else t for name, t in tensors.items()},
            r"lm_head.weight expects the shape .*got \[7, 32\]; use the base model",
        ),
        (
            {},
            lambda tensors: {name: tensor.int() for name, tensor in tensors.items()},
            "lora_A.weight expects floating-point values, got I32; save or download",
        ),
    ],
    ids=["no whole module", "another vocabulary", "integers"],
)
def test_other_tensors_that_do_not_fit(adapter, config, change, words):
    folder, _ = adapter(peft.LoraConfig(**LORA, **config))
    rewritten(folder, change)
    with pytest.raises(ThreestepError, match=words):
        load(folder)


def test_settings_that_are_not_known_or_change_no_weights(adapter):
    folder, _ = adapter(KINDS["lora"]())
    settings_of(folder, of_another_year=False)
    load(folder)
    for changed, words in [
        ({"of_another_year": True}, "settings unknown to the installed PEFT: of_another_year; install"),
        (
            {"of_another_year": False, "peft_type": "MAGIC"},
            "json' cannot be read by the installed PEFT .KeyError: 'MAGIC'",
        ),
    ]:
        settings_of(folder, **changed)
        with pytest.raises(ThreestepError, match=words):
            load(folder)
    adapter(peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ThreestepError, match="an adapter of kind PROMPT_TUNING, which changes no weights and cannot"):
        load(folder)
