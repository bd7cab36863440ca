"""The check of rows with images passes what is right, and names what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.vision_models import FAMILIES, awake, sequence, with_pixels
from threestep.plugins.images.models.pictured import RowImages
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import plain
from training.utils.models.layout_check import check_padded, why_not_packed
from training.utils.models.own_forward import read_again, read_own_forward
from training.utils.models.token_model import PolicyModel

CPU = torch.device("cpu")


def row(family, *parts):
    tokens = sequence(family, *parts)
    tokens.is_target[-3:] = True
    return plain(tokens)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return awake(FAMILIES[request.param]())


@pytest.fixture(scope="module")
def read(family):
    """The model is measured with two rows, whose first images are of the same size."""
    examples = (row(family, 2, "image 0", 4), row(family, 3, "image 3", 1, "image 2", 5))
    read_own_forward(family.model, media=RowImages(family.pixels, examples))
    policy = PolicyModel(family.model)
    return lambda rows: policy(rows).logprobs_M


def test_a_family_is_read_in_padded_rows_and_in_packed_ones(family, read):
    check_padded(family.model, read, CPU)
    window = getattr(family.model.config.get_text_config(), "sliding_window", None)
    assert why_not_packed(family.model, read, min(20, window or 20), CPU) is None
    assert read_again(family.model) == 0.0


def swapped(rows):
    """The pixels of the images in the wrong order; of uneven ones, their first patches."""
    values = rows.media.read.values
    return with_pixels(rows, replace(rows.media.read, values=values.roll(len(values) // 2, 0)))


def without_axes(rows):
    return replace(rows, media=replace(rows.media, axes_3NT=None, blocks_NT=None))


def leaking(rows):
    segments = replace(rows.segments, visible_NSS=torch.ones_like(rows.segments.visible_NSS))
    return replace(rows, segments=segments)


@pytest.mark.parametrize("wrong", [swapped, without_axes], ids=lambda wrong: wrong.__name__)
def test_wrong_rows_are_found(family, read, wrong):
    if wrong is without_axes and not (family.counts_sides or family.sees_itself):
        pytest.skip("its images are read as a text is")
    own = family.model._threestep_own_forward
    assert own.with_media.why_not(read, CPU, text=None) is None
    reason = own.with_media.why_not(lambda rows: read(wrong(rows)), CPU, text=None)
    assert reason.startswith("rows with images differ by ")
    with pytest.raises(ThreestepError, match="cannot be trained on images: rows with images differ by"):
        check_padded(family.model, lambda rows: read(wrong(rows) if rows.media else rows), CPU)
    reason = why_not_packed(family.model, lambda rows: read(wrong(rows) if rows.media else rows), 20, CPU)
    assert reason.startswith("rows with images differ by ")


def test_an_image_that_moves_another_document_or_nothing_is_found(family, read):
    own = family.model._threestep_own_forward
    numbers_M = own.with_media.numbers_M.float()
    first_image = family.pixels([own.with_media.media.examples[0].segments[0].tokens.media[0].key]).values

    def moves_everything(rows):
        is_other = not torch.equal(rows.media.read.values[: len(first_image)], first_image)
        return numbers_M + float(is_other)

    assert own.with_media.why_not(moves_everything, CPU, None) == (
        "an image changes what it computes of another document"
    )
    assert own.with_media.why_not(lambda rows: numbers_M, CPU, None) == (
        "another image changes nothing that it computes"
    )


def test_what_is_not_made_for_the_model_is_told(family):
    examples = (row(family, 2, "image 0", 4),)

    def of_another_size(keys):
        pixels = family.pixels(keys)
        return replace(pixels, values=pixels.values[..., :-1])

    with pytest.raises(ThreestepError, match="cannot be read: its own forward of a row with images fails"):
        read_own_forward(family.model, media=RowImages(of_another_size, examples))
