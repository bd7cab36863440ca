"""What vLLM is handed for images, without vLLM; with it: vllm/test_images.py."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

from tests.support.vision_models import FAMILIES, sequence
from threestep.plugins.images.prompts import PromptImages
from threestep.plugins.vllm.images import _torchvision_named, placed_images


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "llava_next"])
def test_each_image_has_its_pixels_its_place_and_a_digest_of_its_own(name):
    family = FAMILIES[name]()
    prompts = [sequence(family, *parts) for parts in ((2, "image 0", 3, "image 3"), (4,), ("image 3", 1, "image 1"))]
    images = PromptImages(tuple(prompt.media for prompt in prompts), family.pixels)
    placed = placed_images(images, torch.float32)
    assert [[(image.begin, image.tokens) for image in own] for own in placed] == [
        [(span.begin, span.tokens) for span in prompt.media] for prompt in prompts
    ]
    (first, last), none, (again, other) = placed
    assert none == () and last.digest == again.digest
    assert len({first.digest, last.digest, other.digest}) == 3
    pixels = family.pixels([0, 3, 3, 1])
    found = torch.cat([image.values for own in placed for image in own])
    assert torch.equal(found, pixels.values.float()) and found.dtype == torch.float32
    for kind, of_each in (("grid_3", pixels.grids_I3), ("cut_3", pixels.cuts_I3)):
        rows = [getattr(image, kind) for own in placed for image in own]
        assert rows == [None] * 4 if of_each is None else torch.equal(torch.stack(rows), of_each)


def test_pixels_of_another_shape_have_another_digest():
    """Qwen's patches of 2 x 4 and of 4 x 2 are as many numbers."""
    family = FAMILIES["qwen2_vl"]()
    spans = (sequence(family, "image 3").media,)
    pixels = replace(family.pixels([3]), grids_I3=torch.tensor([[1, 2, 8]]))
    one, other = (placed_images(PromptImages(spans, made), torch.float32) for made in (family.pixels, lambda _: pixels))
    assert torch.equal(one[0][0].values, other[0][0].values) and one[0][0].digest != other[0][0].digest


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_the_name_of_torchvision_lasts_as_long_as_it_is_needed():
    with _torchvision_named():
        from torchvision.transforms.v2 import functional

        assert functional.__name__ == "torchvision.transforms.v2.functional"
    assert not [name for name in sys.modules if name.startswith("torchvision")]
    assert importlib.util.find_spec("torchvision") is None
