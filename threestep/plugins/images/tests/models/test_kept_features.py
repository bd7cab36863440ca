"""Kept features of a frozen tower give the numbers and gradients of pixels; which of step 3's models read them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.lora_settings import lora_settings
from tests.support.vision_models import FAMILIES, PlainScorer, answers, awake, llava, sequence
from threestep.plugins.images.kept_features import KeptFeatures
from threestep.plugins.images.models.kept_features import open_feature_reader
from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.lora.shared_trunk import scalar_model_on_trunk
from training.step3_ppo.parts.settings import with_kept_media
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import shared_prompt, unshared
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import freeze_parts, prepared
from training.utils.models.families import scalar_model_class
from training.utils.models.own_forward import read_own_forward
from training.utils.models.token_model import PolicyModel, ScalarModel
from training.utils.models.weights import adapters_off

# Families that cannot, while their projector trains, and when it does not.
DEEP = "its language model reads features from several layers"
CHANGED = "its projector is trained, and its output is changed"
REFUSED = {(name, False): CHANGED for name in ("qwen2_5_vl", "llava_next", "llava_onevision")}
REFUSED |= {("qwen3_vl", False): DEEP, ("qwen3_vl", True): DEEP}


def frozen(family: Any, projector: bool) -> Any:
    family = awake(family)
    settings: Any = SimpleNamespace(freeze_vision_tower=True, freeze_projector=projector)
    freeze_parts(family.model, settings)
    return family


def images_of(family: Any, most_bytes: int = 2**20, **how: bool) -> tuple[RowImages, RowImages]:
    """Read in every forward, and kept."""
    return RowImages(family.pixels, ()), RowImages(family.pixels, (), KeptFeatures(most_bytes, **how))


def rows_of(family: Any) -> tuple[Any, Any]:
    """Two micro-batches that share two pictures; one of these stands there twice without a token between."""
    prompt = shared_prompt(sequence(family, 2, "image 0", 3), answers(family, 2, 5))
    turns = shared_prompt(sequence(family, "image 2", 1, "image 0", 2, "image 1", 2), answers(family, 4))
    twice = shared_prompt(sequence(family, 1, "image 0", "image 0", 3), answers(family, 3))
    text = shared_prompt(sequence(family, 6), answers(family, 3))
    return packed_rows([[prompt, text], [turns]], 0), packed_rows([[twice], [turns]], 0)


def read(family: Any, images: RowImages, rows: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs_M = PolicyModel(family.model)(images.loaded(rows)).logprobs_M
    weights = {name: weight for name, weight in family.model.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(logprobs_M.sum(), list(weights.values()), allow_unused=True)
    return logprobs_M.detach(), dict(zip(weights, gradients, strict=True))


@pytest.mark.parametrize("projector", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_kept_features_give_the_numbers_and_gradients_of_pixels(name, projector):
    family = frozen(FAMILIES[name](), projector)
    reason = open_feature_reader(family.model, family.pixels([0]))
    if (name, projector) in REFUSED:
        assert reason.startswith(REFUSED[name, projector])
        return
    assert reason is None
    pixels, kept = images_of(family)
    patches: list[int] = []
    hook = family.tower.register_forward_pre_hook(lambda *given: patches.append(1), with_kwargs=True)
    for count, rows in enumerate((*rows_of(family), *rows_of(family))):
        expected, expected_gradients = read(family, pixels, rows)
        patches.clear()
        found, gradients = read(family, kept, rows)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for weight, gradient in expected_gradients.items():
            if gradient is None:
                assert gradients[weight] is None, weight
            else:
                torch.testing.assert_close(gradients[weight], gradient, rtol=1e-5, atol=1e-6)
        assert len(patches) == (3, 1, 0, 0)[count]  # of the second micro-batch, the picture that stands there twice
    hook.remove()


@pytest.mark.parametrize(("most_bytes", "evicts", "left"), [(1000, False, 1), (1100, True, 2)])
def test_more_pictures_than_fit_give_the_numbers_of_pixels(most_bytes, evicts, left):
    """What does not fit is read again, or makes room. A picture is 4 patches of 16 numbers, float64: 512 bytes."""
    family = frozen(llava(), False)
    assert open_feature_reader(family.model, family.pixels([0])) is None
    pixels, kept = images_of(family, most_bytes, evicts=evicts)
    first, second = rows_of(family)
    for rows in (first, second, first):
        torch.testing.assert_close(read(family, kept, rows)[0], read(family, pixels, rows)[0], rtol=1e-6, atol=1e-6)
    assert (len(kept.kept), kept.kept.bytes) == (left, 512 * left)


def test_a_model_whose_tower_may_change_or_draws_keeps_nothing():
    family = awake(llava())
    pixels = family.pixels([0])
    assert open_feature_reader(family.model, pixels) == "its vision tower is trained"
    family = frozen(family, False)
    family.model.config.vision_config.attention_dropout = 0.1
    assert open_feature_reader(family.model, pixels) == "its vision tower has dropout"
    next(family.tower.parameters()).ds_id = 1  # as ZeRO-3 marks what is in shards
    assert "is sharded" in open_feature_reader(family.model, pixels)


def test_features_made_of_a_picture_do_not_depend_on_the_others_of_its_micro_batch():
    """So that a run that is resumed, and keeps nothing yet, computes the same to the bit."""
    family = frozen(llava(), False)
    assert open_feature_reader(family.model, family.pixels([0])) is None
    first, second = rows_of(family)
    (_, one), (_, other) = images_of(family), images_of(family)
    for rows in (first, second):
        read(family, one, rows)
    read(family, other, second)
    for picture in ((2, 1), (0, 1), (1, 1)):
        assert torch.equal(one.kept.find(picture), other.kept.find(picture))


def test_what_was_read_longest_ago_makes_room_where_it_should():
    """In step 3. Each is 8 bytes; two fit, and one that is larger than all room changes nothing."""
    kept = KeptFeatures(20, evicts=True)
    for key in (0, 1):
        kept.keep((key, 1), torch.full((2, 1), float(key)))
    assert kept.find((0, 1)) is not None
    kept.keep((2, 1), torch.full((2, 1), 2.0))
    kept.keep((3, 1), torch.zeros(6, 1))
    assert [key for key in range(4) if kept.find((key, 1)) is not None] == [0, 2]
    assert (len(kept), kept.bytes) == (2, 16)


def made() -> tuple[Any, RowImages, Any, Any, Any]:
    """A family and images of its rows, its actor, a reference and a reward model, frozen but for the actor's text."""
    family = awake(llava())
    family.model.requires_grad_(False)
    family.model.model.language_model.requires_grad_(True)
    documents = [shared_prompt(sequence(family, 2, f"image {key}", 3), answers(family, 4)) for key in (0, 1)]
    images = RowImages(family.pixels, tuple(alone for document in documents for alone in unshared(document)))
    reference = copy.deepcopy(family.model).requires_grad_(False)
    config = copy.deepcopy(family.model.config)
    config.num_labels = 1
    scorer = scalar_model_class(config).from_config(config, dtype=torch.float64).eval().requires_grad_(False)
    scorer.load_state_dict(PlainScorer(family).state_dict())
    for model in (family.model, reference, scorer):
        read_own_forward(model, media=images)
    return family, images, family.model, reference, scorer


def roles_of(actor: Any, reference: Any, scorer: Any) -> Any:
    policies = [PolicyModel(model) for model in (actor, reference)]

    class Engine:
        ranks = SimpleNamespace(device=torch.device("cpu"), is_main=True)
        eval = actor.eval

        def __call__(self, rows: Any) -> Any:
            return policies[0](rows)

    return SimpleNamespace(
        actor=Engine(),
        actor_model=actor,
        readers={
            "actor": (actor, lambda rows: policies[0](rows).logprobs_M),
            "reference": (reference, lambda rows: policies[1](rows).logprobs_M),
            "reward model": (scorer, ScalarModel(scorer)),
        },
        reading=nullcontext,
    )


def opened(images: RowImages, *models: Any, megabytes: int = 1) -> tuple[Any, list[str]]:
    said: list[str] = []
    return with_kept_media(images, megabytes, roles_of(*models), lambda text, is_main: said.append(text)), said


def test_models_whose_tower_is_the_actors_read_its_features():
    family, images, *models = made()
    kept, said = opened(images, *models)
    assert said == ["keeping up to 1 MiB of image features for: actor, reference, reward model"]
    ran: list[int] = []
    for model in models:
        model.model.vision_tower.register_forward_pre_hook(lambda *given: ran.append(1), with_kwargs=True)
    prompt = shared_prompt(sequence(family, 2, "image 2", 3), answers(family, 2, 5))
    for rows in (kept.loaded(packed_rows([[prompt]], 0)), kept.loaded(packed_rows([[prompt, prompt]], 0))):
        PolicyModel(models[0])(rows), PolicyModel(models[1])(rows), ScalarModel(models[2])(rows)
    assert len(ran) == 1  # laid out before the first has made them, and beside itself in another row


def test_a_model_with_another_tower_reads_pixels_and_gives_its_own_numbers():
    _, images, actor, reference, scorer = made()
    with torch.no_grad():
        next(scorer.model.vision_tower.parameters()).flatten()[0] += 1.0
        rows = images.loaded(packed_rows([[document] for document in images.examples], 0))
        plain_B = ScalarModel(scorer)(rows)
        kept, said = opened(images, actor, reference, scorer)
        found_B = ScalarModel(scorer)(kept.loaded(packed_rows([[one] for one in images.examples], 0)))
    assert said[0].startswith("the reward model runs on pixels instead of kept features: its vision tower or proj")
    assert said[1].endswith("of image features for: actor, reference")
    assert torch.equal(found_B, plain_B)


@pytest.mark.parametrize("trains", [False, True])
def test_a_model_with_another_projector_reads_features_where_they_go_into_it(trains):
    """Where the actor's projector trains. Else what comes out of it is kept."""
    _, images, actor, reference, scorer = made()
    actor.model.multi_modal_projector.requires_grad_(trains)
    with torch.no_grad():
        next(scorer.model.multi_modal_projector.parameters()).flatten()[0] += 1.0
    read_own_forward(scorer, media=images)
    _, said = opened(images, actor, reference, scorer)
    assert said[-1].endswith("actor, reference, reward model" if trains else "actor, reference")


def test_an_actor_whose_tower_trains_is_refused():
    _, images, actor, reference, scorer = made()
    actor.requires_grad_(True)
    with pytest.raises(
        ThreestepError, match="^--kept_image_features_mb 1 does not work with this .*: its vision tower"
    ):
        opened(images, actor, reference, scorer)
    assert opened(images, actor, reference, scorer, megabytes=0) == (images, [])


@pytest.mark.parametrize("projector", [False, True])
def test_adapters_learn_from_features_what_they_learn_from_pixels(projector):
    """Of actor and critic on one trunk, the reference being the actor without adapters; also where the projector trains
    as well."""
    family = awake(llava())
    documents = [shared_prompt(sequence(family, 2, f"image {key}", 3), answers(family, 4)) for key in (0, 1)]
    images = RowImages(family.pixels, tuple(alone for document in documents for alone in unshared(document)))
    read_own_forward(family.model, media=images)
    settings = lora_settings("", lora_dim=2)
    critic: Any = scalar_model_on_trunk(family.model, settings, pad_token_id=0, media=images).eval()
    actor: Any = prepared(family.model, settings).eval()
    for number, model in enumerate((actor, critic)):  # adapters start with 0
        torch.manual_seed(number)
        for weight in model.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.2)
    actor.model.multi_modal_projector.requires_grad_(projector)
    roles = roles_of(actor, actor, critic)
    roles.readers = {"actor": roles.readers["actor"], "critic": (critic, ScalarModel(critic))}
    said: list[str] = []
    kept: Any = with_kept_media(images, 1, roles, lambda text, is_main: said.append(text))
    assert said[-1].endswith("of image features for: actor, critic")
    ran: list[int] = []
    actor.model.vision_tower.register_forward_pre_hook(lambda *given: ran.append(1), with_kwargs=True)
    critic.model.vision_tower.register_forward_pre_hook(lambda *given: ran.append(1), with_kwargs=True)
    prompt = shared_prompt(sequence(family, 1, "image 2", 2), answers(family, 2, 5))
    rows = packed_rows([[*documents, prompt]], 0)
    expected, found = (numbers_of(actor, critic, of.loaded(rows)) for of in (images, kept))
    assert len(ran) == 3 + 1  # for policy, reference and critic; and once where it is kept
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert not torch.equal(expected[0], expected[1])  # adapters change what is read


def numbers_of(actor: Any, critic: Any, rows: Any) -> list[torch.Tensor]:
    """What policy, reference and critic read, and gradients of all that trains."""
    logprobs_M, values_M = PolicyModel(actor)(rows).logprobs_M, ScalarModel(critic)(rows, at="targets")
    with torch.no_grad(), adapters_off(actor):
        reference_M = PolicyModel(actor)(rows).logprobs_M
    weights = [weight for model in (actor, critic) for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(logprobs_M.sum() + values_M.square().sum(), weights)
    return [logprobs_M.detach(), reference_M, values_M.detach(), *gradients]
