"""Readers of images: which folders have one, tiles and tokens of a picture, and small pictures for a page."""

from __future__ import annotations

import base64
import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_processing_utils import select_best_resolution

from tests.support.image_readers import picture, reader_of, tokenizer_of, write_folder
from tests.support.vision_models import GRIDS, llava_next, llava_onevision
from threestep.plugins.images.data.families import pixels_of_picture
from threestep.plugins.images.data.reader import PixelReader, open_image_reader
from threestep.plugins.images.data.shown import counting_placeholders, shown_images
from threestep.plugins.images.data.tiled import TileSizes, joined_tokens
from threestep.plugins.images.pixels import pixel_inputs
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import MediaSpan


def config_of(folder):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def test_a_reader_is_of_a_folder_with_an_image_processor_whose_tokens_the_tokenizer_has(tmp_path):
    folder = write_folder(tmp_path / "model")
    tokenizer = tokenizer_of("qwen2_vl")
    reader = open_image_reader(str(folder), config_of(folder), tokenizer)
    assert reader.sentence == (
        "images: prepared by Qwen2VLImageProcessorPil; their tokens are checked against those of Qwen2VLProcessor"
    )
    assert reader.text_of(picture(56, 56), "here").text == "<|image_pad|>" * 4
    with pytest.raises(ThreestepError, match="the tokenizer has no token number 260, which models of the family"):
        open_image_reader(str(folder), config_of(folder), tokenizer_of("llava").__class__(vocab={"a": 0}, merges=[]))
    (folder / "preprocessor_config.json").unlink()
    assert open_image_reader(str(folder), config_of(folder), tokenizer) is None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config["text_config"], "model_type": "llama"}))
    assert open_image_reader(str(folder), config_of(folder), tokenizer) is None


def test_a_picture_that_is_cut_up_has_a_span_for_each_tile():
    reader = reader_of("idefics3", tokenizer_of("idefics3"))
    wide, plain = picture(64, 32), picture(16, 16)
    tiles = reader.text_of(wide, "here").runs
    assert len(tiles) == 3 and len(reader.text_of(plain, "here").runs) in (1, 5)
    pixels = PixelReader(reader, [wide])
    assert pixels([0, 0, 0, 0, 0, 0]).values.shape == (6, 3, 16, 16) and pixels([0] * 3).grids_I3 is None
    with pytest.raises(AssertionError, match="a picture of 3 parts has spans of"):
        PixelReader(reader, [wide, wide])([0, 0, 1])
    spans = [MediaSpan(begin, 4, key=0) for begin in (2, 9, 16, 30, 37, 44)]
    first, second = shown_images(spans, [wide], reader)
    assert first.words.endswith("12 tokens in 3 tiles from token 2") and second.words.endswith("from token 30")


def test_a_picture_on_a_page_is_small_and_placeholders_are_counted():
    reader = reader_of("gemma3", tokenizer_of("gemma3"))
    (shown,) = shown_images([MediaSpan(5, 4, sees_itself=True)], [picture(1000, 500, form="JPEG")], reader)
    assert shown.words.startswith("1000 x 500 pixels (JPEG, ") and shown.words.endswith("4 tokens from token 5")
    kind, _, data = shown.uri().partition(";base64,")
    assert kind == "data:image/png" and Image.open(io.BytesIO(base64.b64decode(data))).size == (256, 128)
    decode = counting_placeholders(lambda ids: "".join("<i>" if number else "a" for number in ids), "<i>")
    assert decode([0, 1, 1, 1, 0, 1, 0]) == "a<i> x 3a<i>a"


@pytest.mark.parametrize("text", ["[]", "{", '{"image_processor_type": 3}', '{"size": "x"}'])
def test_settings_of_an_image_processor_that_are_not_read(tmp_path, text):
    """That is not a folder without an image processor."""
    folder = write_folder(tmp_path / "model")
    (folder / "preprocessor_config.json").write_text(text)
    with pytest.raises(ThreestepError, match="the installed transformers cannot read preprocessor_config.json"):
        open_image_reader(str(folder), config_of(folder), tokenizer_of("qwen2_vl"))


@pytest.mark.parametrize("make, most_tiles", [(llava_next, None), (llava_onevision, 1)], ids=["next", "onevision"])
def test_a_picture_has_as_many_tokens_as_the_model_makes_features(make, most_tiles):
    """Of all shapes, also with borders to leave out on either side, and thin ones of which no line is left."""
    model, sizes = make().model, TileSizes(GRIDS, 28, 2, most_tiles)
    shapes = [(28, 28), (40, 56), (56, 40), (20, 50), (50, 20), (3, 90), (90, 3), (57, 56), (10, 56), (7, 9)]
    for height, width in shapes:
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
