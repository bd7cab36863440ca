"""What pictures take of a forward, counted on a tower without weights, is what a real tower keeps of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.kept_bytes import kept_bytes
from tests.support.tiny_models import tiny_causal_lm
from tests.support.vision_models import FAMILIES
from threestep.plugins.images.flags import ImageArguments
from threestep.plugins.images.pixels import pixel_inputs
from threestep.plugins.images.run.planned_images import PlannedImages, saved_by_picture
from threestep.plugins.speed.lean.forwards import keep_less
from training.utils.loading.models import freeze_parts
from training.utils.models.families import is_beside_language

DEPTHS = ("depth", "num_hidden_layers")


def on_meta(model: Any) -> Any:
    with torch.device("meta"):
        plain = type(model)._from_config(model.config, dtype=model.dtype)
    for (_, part), (_, own) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        part.requires_grad_(own.requires_grad)
    return plain.train()


def kept_by_tower(model: Any, pixels: Any) -> int:
    """Bytes that a real forward of tower and projector keeps, beside the weights."""
    given = pixel_inputs(model.config, pixels)
    values = given.pop("pixel_values")
    return kept_bytes(model, lambda: model.base_model.get_image_features(values, **given, return_dict=True))


def deep(name: str) -> Any:
    """A family whose tower has four blocks."""
    family = FAMILIES[name]()
    config = family.model.config
    for depth in DEPTHS:
        if hasattr(config.vision_config, depth):
            setattr(config.vision_config, depth, 4)
    family.model = type(family.model)(config).double().train()
    return family


@pytest.mark.parametrize(("tower", "projector"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_what_a_real_tower_keeps(name, tower, projector):
    family = deep(name)
    settings: Any = SimpleNamespace(freeze_vision_tower=tower, freeze_projector=projector)
    freeze_parts(family.model, settings)
    pixels = family.pixels([0, 2])
    counted = saved_by_picture(on_meta(family.model), pixels)
    assert len(counted.layers) == 4
    assert counted.held(False) == pytest.approx(kept_by_tower(family.model, pixels), rel=0.05)


def test_pictures_fill_a_forward_by_their_tokens():
    family = deep("qwen2_vl")
    freeze_parts(family.model, SimpleNamespace(freeze_vision_tower=True, freeze_projector=False))
    model, pixels = on_meta(family.model), family.pixels([0])  # 6 tokens of 4 patches
    pictures = PlannedImages(pixels, tokens=6, most=60, at_once=180)
    block = 10 * saved_by_picture(model, pixels, trains=True).layers[0]
    held = {line.name: line.device_bytes for line in pictures.lines(model, beside=0)}
    assert held["images: pixels"] == 180 * 4 * 3 * 2 * 14 * 14 * 8
    assert held["images: embeddings"] == 60 * 32 * 8
    assert held["images: activations of tower and projector"] == block
    after = pictures.lines(model, beside=2 * block)[-1].device_bytes  # the block is gone before the height
    assert after == 10 * saved_by_picture(model, pixels).held(False) < block
    assert pictures.lines(model)[-1].device_bytes == block


def test_a_tower_keeps_all_while_it_is_recomputed_or_reads_without_a_backward():
    """Its norms keep less only where they are trained without gradient checkpointing."""
    family = deep("qwen2_5_vl")
    plain, lean = on_meta(family.model), on_meta(family.model)
    assert keep_less(lean) > 0
    pictures = PlannedImages(family.pixels([0]), tokens=6, most=60, at_once=180)
    kept, less = (
        [pictures.lines(model, *how)[-1].device_bytes for how in ((False, 0), (True, 0), (False, None))]
        for model in (plain, lean)
    )
    assert less[0] < kept[0] and less[1:] == kept[1:]


def test_kept_features_are_on_the_host_and_a_model_of_text_takes_nothing():
    pictures = PlannedImages(FAMILIES["llava"]().pixels([0]), 4, 40, 40)
    line = pictures.kept(SimpleNamespace(of=lambda kind: ImageArguments(3)))
    assert (line.device_bytes, line.host_bytes) == (0, 3 * 2**20)
    assert pictures.lines(tiny_causal_lm("llama"), beside=0) == []


def test_the_models_own_weights_stay_without_memory():
    model = on_meta(FAMILIES["llava"]().model)
    of_vision = is_beside_language(model)
    saved_by_picture(model, FAMILIES["llava"]().pixels([0]))
    assert all(part.is_meta for name, part in model.named_parameters() if of_vision(name))
