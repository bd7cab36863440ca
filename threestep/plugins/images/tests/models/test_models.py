"""Language, tower and projector of a model: what trains of them, and where adapters stand."""

from __future__ import annotations

import pytest

from tests.support.lora_settings import lora_settings
from tests.support.vision_models import FAMILIES, llava, qwen2_vl
from threestep.plugins.quantized.layers import quantizable_layers
from threestep.plugins.speed.compiled import compile_blocks
from training.utils.loading.models import freeze_parts, prepared
from training.utils.models.attention import BY_DOCUMENT, text_attention
from training.utils.models.document_attention import use_document_attention
from training.utils.models.families import (
    is_beside_language,
    is_of_projector,
    language_part,
)
from training.utils.models.flops import model_shape
from training.utils.models.settings import ModelSettings

PROJECTORS = {
    "qwen2_vl": {"model.visual.merger"},
    "qwen2_5_vl": {"model.visual.merger"},
    "qwen3_vl": {"model.visual.merger", "model.visual.deepstack_merger_list"},
    "llava": {"model.multi_modal_projector"},
    "llava_next": {"model.multi_modal_projector", "model.image_newline"},
    "llava_onevision": {"model.multi_modal_projector", "model.image_newline"},
    "gemma3": {"model.multi_modal_projector"},
    "idefics3": {"model.connector"},
    "smolvlm": {"model.connector"},
    "internvl": {"model.multi_modal_projector"},
}


def language(model) -> str:
    return "language_model" if hasattr(model.model, "language_model") else "text_model"


@pytest.fixture(scope="module", params=FAMILIES)
def named(request):
    return request.param, FAMILIES[request.param]().model


def test_the_parts_are_known_by_their_names(named):
    name, model = named
    part = language(model)
    assert language_part(model) is getattr(model.model, part)
    of_vision = is_beside_language(model)
    weights = [weight for weight, _ in model.named_parameters()]
    of_language = {weight for weight in weights if not of_vision(weight)}
    assert of_language == {weight for weight in weights if weight.startswith((f"model.{part}.", "lm_head."))}
    projectors = {weight for weight in weights if of_vision(weight) and is_of_projector(weight)}
    assert projectors == {weight for weight in weights if weight.startswith(tuple(PROJECTORS[name]))} != set()
    assert not any(map(is_beside_language(language_part(model)), weights))


def test_the_tower_keeps_its_attention_and_is_left_out_of_what_is_for_text(named):
    name, model = named
    use_document_attention(model)
    assert text_attention(model) == BY_DOCUMENT
    assert model.config.vision_config._attn_implementation == "sdpa"
    text = language_part(model)
    assert compile_blocks(model) == 2 == len(text.layers)
    for layer in text.layers:
        layer._compiled_call_impl = None
    rounded = quantizable_layers(model.float())
    assert len(rounded) == 14 and not any(map(is_beside_language(model), rounded))
    matrices = [weight for weight in text.parameters() if weight.dim() >= 2 and weight is not text.embed_tokens.weight]
    assert model_shape(model).body_trained == sum(weight.numel() for weight in matrices)


TOWERS = {qwen2_vl: "model.visual.", llava: "model.vision_tower."}


def trained(model) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("make", TOWERS, ids=lambda make: make.__name__)
def test_the_tower_is_frozen_by_default_and_the_projector_trains(make):
    model, tower = make().model, TOWERS[make]
    everything = trained(model)
    projector = {name for name in everything if "merger" in name or "projector" in name}
    freeze_parts(model, ModelSettings("m"))
    assert everything - trained(model) == {name for name in everything if name.startswith(tower)} - projector
    freeze_parts(model, ModelSettings("m", freeze_projector=True))
    assert everything - trained(model) == {name for name in everything if name.startswith(tower)} | projector


def test_the_tower_trains_where_it_is_not_frozen_and_is_adapted_where_it_is_named():
    model = qwen2_vl().model
    freeze_parts(model, ModelSettings("m", freeze_vision_tower=False))
    assert trained(model) == {name for name, _ in model.named_parameters()}
    model = qwen2_vl().model
    settings = lora_settings("m", lora_dim=2, lora_module_name="visual.blocks,q_proj", only_optimize_lora=False)
    prepared(model, settings)
    tower = {name for name in trained(model) if name.startswith("model.visual.") and "merger" not in name}
    assert tower and all(".lora_" in name for name in tower)  # its own weights stay frozen
    assert {name for name in trained(model) if "language_model" in name and ".lora_" in name}


@pytest.mark.parametrize("part", ["all-linear", "q_proj,down_proj"])
def test_adapters_stand_on_the_language_model(part):
    """CLIP's layers have names of their own, and some of the language model's too."""
    model = llava().model
    prepared(model, lora_settings("m", lora_dim=2, lora_module_name=part))
    adapted = {name for name in trained(model) if ".lora_" in name}
    assert adapted == trained(model)
    assert len(adapted) == 2 * 2 * (7 if part == "all-linear" else 2)
    assert all(name.startswith("model.language_model.") for name in adapted)
