"""Features of a frozen tower that are kept give the numbers and gradients of pixels that are read in every forward, and
the tower runs once for a picture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.vision_models import FAMILIES, answers, awake, llava, sequence
from threestep.plugins.images.kept_features import KeptFeatures
from threestep.plugins.images.models.kept_features import open_feature_reader
from threestep.plugins.images.models.pictured import RowImages
from training.utils.contracts.documents import shared_prompt
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import freeze_parts
from training.utils.models.token_model import PolicyModel

# Families that cannot, while their projector trains, and when it does not.
DEEP = "its language model reads features of several layers"
CHANGED = "its projector trains, and what it makes is changed"
REFUSED = {(name, False): CHANGED for name in ("qwen2_5_vl", "llava_next", "llava_onevision")}
REFUSED |= {("qwen3_vl", False): DEEP, ("qwen3_vl", True): DEEP}


def frozen(family: Any, projector: bool) -> Any:
    family = awake(family)
    settings: Any = SimpleNamespace(freeze_vision_tower=True, freeze_projector=projector)
    freeze_parts(family.model, settings)
    return family


def images_of(family: Any, most_bytes: int) -> tuple[RowImages, RowImages]:
    """Read in every forward, and kept."""
    return RowImages(family.pixels, ()), RowImages(family.pixels, (), KeptFeatures(most_bytes))


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
    pixels, kept = images_of(family, 2**20)
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


def test_what_does_not_fit_is_kept_by_none_and_read_again():
    family = frozen(llava(), False)
    assert open_feature_reader(family.model, family.pixels([0])) is None
    pixels, kept = images_of(family, 1000)  # a picture is 4 patches of 16 numbers, float64: 512 bytes
    first, second = rows_of(family)
    for rows in (first, second, first):
        torch.testing.assert_close(read(family, kept, rows)[0], read(family, pixels, rows)[0], rtol=1e-6, atol=1e-6)
    assert (len(kept.kept), kept.kept.bytes) == (1, 512)


def test_a_model_whose_tower_may_change_or_draws_keeps_nothing():
    family = awake(llava())
    pixels = family.pixels([0])
    assert open_feature_reader(family.model, pixels) == "its vision tower trains"
    family = frozen(family, False)
    family.model.config.vision_config.attention_dropout = 0.1
    assert open_feature_reader(family.model, pixels) == "its vision tower has dropout"
    next(family.tower.parameters()).ds_id = 1  # as ZeRO-3 marks what is in shards
    assert "in shards" in open_feature_reader(family.model, pixels)


def test_features_made_of_a_picture_do_not_depend_on_the_others_of_its_micro_batch():
    """So that a run that is resumed, and keeps nothing yet, computes the same to the bit."""
    family = frozen(llava(), False)
    assert open_feature_reader(family.model, family.pixels([0])) is None
    first, second = rows_of(family)
    _, one = images_of(family, 2**20)
    _, other = images_of(family, 2**20)
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


def test_more_pictures_than_fit_give_the_numbers_of_pixels():
    family = frozen(llava(), False)
    assert open_feature_reader(family.model, family.pixels([0])) is None
    pixels, kept = RowImages(family.pixels, ()), RowImages(family.pixels, (), KeptFeatures(1100, evicts=True))
    first, second = rows_of(family)
    for rows in (first, second, first):
        torch.testing.assert_close(read(family, kept, rows)[0], read(family, pixels, rows)[0], rtol=1e-6, atol=1e-6)
    assert (len(kept.kept), kept.kept.bytes) == (2, 1024)
