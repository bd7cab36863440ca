"""Tokens of pictures that are cut into tiles and put together again: as many as the family's model makes features."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.image_processing_utils import select_best_resolution

from tests.support.image_readers import picture, reader_of, tokenizer_of
from tests.support.vision_models import GRIDS, llava_next, llava_onevision
from threestep.plugins.images.data.families import pixels_of_picture
from threestep.plugins.images.data.tiled import TileSizes, joined_tokens
from threestep.plugins.images.pixels import pixel_inputs


@pytest.mark.parametrize("make, most_tiles", [(llava_next, None), (llava_onevision, 1)], ids=["next", "onevision"])
def test_a_picture_has_as_many_tokens_as_the_model_makes_features(make, most_tiles):
    """Of all shapes, also with borders to leave out on either side, and thin ones of which no line is left."""
    model, sizes = make().model, TileSizes(GRIDS, 28, 2, most_tiles)
    for height, width in [
        (28, 28),
        (40, 56),
        (56, 40),
        (20, 50),
        (50, 20),
        (3, 90),
        (90, 3),
        (57, 56),
        (10, 56),
        (7, 9),
    ]:
        tiles = 1 + math.prod(side // 28 for side in select_best_resolution((height, width), GRIDS))
        features = {"pixel_values": np.zeros((1, tiles, 3, 28, 28), dtype=np.float32), "image_sizes": [[height, width]]}
        pixels = pixels_of_picture(features)
        assert pixels.counts == [tiles]
        given = pixel_inputs(model.config, pixels)
        with torch.no_grad():
            (made,) = model.model.get_image_features(
                given["pixel_values"].double(), given["image_sizes"], return_dict=True
            ).pooler_output
        assert joined_tokens(sizes, height, width) == len(made), (height, width)


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_all_sizes_are_as_the_familys_own_processor_has_them(family):
    """The reader compares each, and would raise."""
    reader = reader_of(family, tokenizer_of(family))
    found = {
        reader.text_of(picture(width, height), "here").tokens for width in range(9, 60, 10) for height in (8, 17, 33)
    }
    assert len(found) > 4
