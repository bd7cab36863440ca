"""Pictures that clients of the training server send: what is read of them, and what is refused in which words."""

from __future__ import annotations

import base64

import pytest

from tests.support.image_readers import reader_of, tokenizer_of
from tests.support.sent_pictures import photo
from threestep.plugins.images.data import decoding
from threestep.plugins.images.run.sent_images import SentImages
from threestep.plugins.images.tests.data.test_values import empty_png
from training.utils.base.errors import ThreestepError

FINE = photo(1, 84, 56)


@pytest.fixture(scope="module")
def media():
    tokenizer = tokenizer_of("qwen2_vl")
    return SentImages(reader_of("qwen2_vl", tokenizer), tokenizer)


def read(media, kind="image", **given):
    return media.read(kind, {"data": FINE, "format": "png", **given}, "datum 3: model_input, chunk 1")


def test_a_picture_is_its_tokens_in_either_form(media):
    plain = read(media)
    assert plain.ids == (media.placeholder_id,) * 6 and plain.data == FINE
    assert [(span.begin, span.tokens, span.sides) for span in plain.media] == [(0, 6, (2, 3))]
    assert read(media, data=base64.b64encode(FINE).decode(), expected_tokens=6) == plain
    assert len(read(media, data=photo(1, 56, 56, "JPEG"), format="jpeg").ids) == 4
    [span] = media.of([FINE]).of_prompts([plain.media]).spans[0]
    assert media.of([FINE]).pixels_of([span.key]).grids_I3.tolist() == [[1, 4, 6]]


@pytest.mark.parametrize("family", ["llava", "idefics3", "gemma3", "internvl", "llava_onevision"])
def test_a_picture_of_other_families_is_all_that_they_write_for_it(family):
    tokenizer = tokenizer_of(family)
    reader = reader_of(family, tokenizer)
    media = SentImages(reader, tokenizer)
    text = reader.text_of(FINE, "here")
    found = media.read("image", {"data": FINE, "format": "png"}, "here")
    assert list(found.ids) == tokenizer(text.text, add_special_tokens=False)["input_ids"]
    assert sum(span.tokens for span in found.media) == found.ids.count(media.placeholder_id) == text.tokens
    assert media.most == (1 if family == "llava_onevision" else None)
    assert len(media.run.examples) == 2


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"data": "%%%"}, "chunk 1: data expects a base64-encoded image, got other text"),
        ({"data": None}, "chunk 1: data expects the bytes of an image, got NoneType"),
        ({"data": FINE[:-200]}, "chunk 1: the image cannot be decoded"),
        ({"data": empty_png(9_000, 9_000)}, "chunk 1: expected an image of 1 to 50,000,000 pixels, got 9,000 x 9,000"),
        ({"data": empty_png(100_000, 100_000)}, "chunk 1: the image cannot be decoded .*could be decompression bomb"),
        ({"data": photo(1, 20_000, 28)}, "an image of 20000 x 28 pixels cannot be prepared for the model: .*200"),
        ({"format": "jpeg"}, "chunk 1: format must be png or jpeg, matching the image, got 'jpeg' for"),
        ({"format": "webp", "data": photo(1, 56, 56, "WEBP")}, "got 'webp' for a WEBP image; set the"),
        ({"format": None}, "chunk 1: format must be png or jpeg, matching the image, got None"),
        ({"expected_tokens": 7}, r"expected_tokens must be 6, .* an image of 84 x 56 pixels, got 7; count with the"),
        ({"expected_tokens": True}, "expected_tokens must be a whole number, got True"),
        ({"override_dimensions": (1, 2)}, "chunk 1: 'override_dimensions' is not supported for images; remove it"),
        ({"kind": "image_asset_pointer"}, "an image_asset_pointer is not supported, .*; send the image itself as an"),
        ({"kind": "dmel"}, "chunk 1: expected encoded_text or image, got dmel"),
    ],
)  # fmt: skip
def test_others_are_refused_in_a_sentence(media, given, sentence):
    with pytest.raises(ThreestepError, match=f"^datum 3: model_input, .*{sentence}"):
        read(media, **given)
    read(media)


def test_without_memory_the_picture_is_refused(media, monkeypatch):
    def full(image):
        raise MemoryError

    monkeypatch.setattr(decoding, "_in_rgb", full)
    with pytest.raises(ThreestepError, match="there is not enough memory to decode the image; send a smaller one"):
        read(media)
