"""A scalar model on the trunk of a model of images and text reads and learns what one of its own does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.support.lora_settings import lora_settings
from tests.support.two_roles import read_while_learning, trained
from tests.support.vision_models import FAMILIES, Family, answers, awake, sequence
from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.lora.shared_trunk import scalar_model_on_trunk
from training.utils.contracts.documents import plain, shared_prompt, together
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import prepared
from training.utils.models.families import is_beside_language, scalar_model_class
from training.utils.models.layout_check import check_padded
from training.utils.models.own_forward import own_forward_of, read_own_forward
from training.utils.models.token_model import ScalarModel

ACTOR = lora_settings("", lora_dim=3, takes_media=True)
CRITIC = lora_settings("", lora_dim=2, lora_alpha=6.0, takes_media=True)


def images_of(family: Family) -> RowImages:
    examples = (["image 0", 2], [1, "image 1", 2])
    found = (together([sequence(family, *shape), *answers(family, 3)]) for shape in examples)
    return RowImages(family.pixels, tuple(map(plain, found)))


def drawn(model: Any, seed: int) -> Any:
    """What trains, also what starts with 0, drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


def start(name: str) -> tuple[Family, RowImages]:
    """A family as it is loaded: its own forward is measured before adapters are put on."""
    family = awake(FAMILIES[name]())
    images = images_of(family)
    read_own_forward(family.model, media=images)
    return family, images


def shared(name: str) -> tuple[Any, Any]:
    family, images = start(name)
    critic = scalar_model_on_trunk(family.model, CRITIC, pad_token_id=0, media=images)
    own = own_forward_of(critic)
    assert own is not None and own.with_media is not None and own.with_media.of_scores
    return prepared(family.model, ACTOR), critic.eval()


def apart(name: str) -> tuple[Any, Any]:
    """The same without anything in common."""
    family, images = start(name)
    config = copy.deepcopy(family.model.config)
    config.num_labels = 1
    critic = scalar_model_class(config).from_config(config).double().eval()
    critic.base_model.load_state_dict(family.model.base_model.state_dict())
    read_own_forward(critic, media=images)
    return prepared(family.model, ACTOR), prepared(critic, CRITIC)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_reads_and_learns_as_two_separate_models_do(name):
    """A few steps of Adam on both losses, in float64: equal to the last bit, as the sums are the same ones."""
    family = FAMILIES[name]()
    prompt = shared_prompt(sequence(family, 2, "image 0", 3), answers(family, 2, 5))
    text = shared_prompt(sequence(family, 6), answers(family, 3))
    rows = images_of(family).loaded(packed_rows([[prompt, text]], 0))
    numbers, weights = [], []
    for make in (shared, apart):
        actor, critic = make(name)
        drawn(actor, 1), drawn(critic, 2)
        numbers.append(read_while_learning(actor, critic, rows, steps=2))
        weights.append([*trained(actor).values(), *trained(critic).values()])
    assert all(one.equal(other) for one, other in zip(*numbers, strict=True))
    assert all(one.equal(other) for one, other in zip(*weights, strict=True))
    assert numbers[0][0].equal(numbers[0][3])  # the reference stays
    assert not numbers[0][1].equal(numbers[0][4]) and not numbers[0][2].equal(numbers[0][5])


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_a_new_critic_passes_the_check_of_images_though_it_scores_everything_0(name):
    _, critic = shared(name)
    check_padded(critic, ScalarModel(critic), torch.device("cpu"))
    own = own_forward_of(critic)
    assert own is not None and own.with_media is not None and not own.with_media.numbers_M.any()


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_tower_and_projector_are_there_once_and_frozen(name):
    actor, critic = shared(name)
    places = []
    for model in (actor, critic):
        of_vision = is_beside_language(model)
        weights = [weight for part, weight in model.named_parameters() if of_vision(part)]
        assert weights and not any(weight.requires_grad for weight in weights)
        places.append({weight.data_ptr() for weight in weights})
    assert places[0] == places[1]
