"""Tower and projector train as the flags say, and adapters stand on the language model."""

from __future__ import annotations

import pytest

from tests.support.lora_settings import lora_settings
from tests.support.vision_models import llava, qwen2_vl
from training.utils.loading.models import freeze_parts, prepared
from training.utils.models.settings import ModelSettings

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


def test_without_freezing_all_weights_train():
    model = qwen2_vl().model
    freeze_parts(model, ModelSettings("m", freeze_vision_tower=False))
    assert trained(model) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("part", ["all-linear", "q_proj,down_proj"])
def test_adapters_stand_on_the_language_model(part):
    """CLIP's layers have names of their own, and some of the language model's too."""
    model = llava().model
    prepared(model, lora_settings("m", lora_dim=2, lora_module_name=part))
    adapted = {name for name in trained(model) if ".lora_" in name}
    assert adapted == trained(model)
    assert len(adapted) == 2 * 2 * (7 if part == "all-linear" else 2)
    assert all(name.startswith("model.language_model.") for name in adapted)


def test_a_part_of_the_tower_alone_is_adapted_where_it_is_named():
    model = qwen2_vl().model
    settings = lora_settings("m", lora_dim=2, lora_module_name="visual.blocks,q_proj", only_optimize_lora=False)
    prepared(model, settings)
    tower = {name for name in trained(model) if name.startswith("model.visual.") and "merger" not in name}
    assert tower and all(".lora_" in name for name in tower)  # its own weights stay frozen
    assert {name for name in trained(model) if "language_model" in name and ".lora_" in name}
