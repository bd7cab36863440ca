"""Pixels for rows that are laid out, and an image for a micro-batch without one."""

from __future__ import annotations

import torch

from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.images.pixels import ImagePixels
from training.utils.contracts.documents import MediaSpan, TokenSequence, plain
from training.utils.layout.rows import lacks_media, laid_out, packed_rows

IMAGE = 90


def document(ids, *images):
    is_target = torch.zeros(len(ids), dtype=torch.bool)
    is_target[-1] = True
    return plain(TokenSequence(torch.tensor(ids), is_target, images))


LARGE = document([5, IMAGE, IMAGE, IMAGE, IMAGE, 6], MediaSpan(1, 4, (2, 2), key=7))
BOTH = document([IMAGE, 5, IMAGE, IMAGE, 6], MediaSpan(0, 1, (1, 1), key=3), MediaSpan(2, 2, (1, 2), key=4))
TEXT, OTHER = document([1, 2, 3]), document([4, 5])


def pixels_of(keys):
    return ImagePixels(torch.tensor(list(keys), dtype=torch.float32).unsqueeze(1))


IMAGES = RowImages(pixels_of, (LARGE, BOTH))


def test_pixels_come_in_the_order_of_the_rows():
    rows = laid_out([[BOTH, TEXT], [LARGE]], 0, IMAGES)
    assert rows.media.read.values.flatten().tolist() == [3, 4, 7]
    assert laid_out([[TEXT], [OTHER]], 0, IMAGES).media is None
    assert laid_out([[TEXT], [OTHER]], 0, None).media is None


def test_micro_batches_that_lack_images():
    """Two ranks, three micro-batches of rows of documents; documents 0 and 3 have images."""
    step = ((((0,),), ((1,), (2,)), ()), (((4,),), ((5, 3),), ((6,),)))
    seen = [True, False, False, True, False, False, False]
    assert lacks_media(step, 0, seen) == [False, True, False]
    assert lacks_media(step, 1, seen) == [True, False, False]
    assert lacks_media(step[:1], 0, seen) == [False, False, False]


def test_the_smallest_image_stands_alone():
    (segment,) = IMAGES.alone.segments
    assert segment.tokens.input_ids.tolist() == [IMAGE]
    assert not segment.tokens.is_target.any()
    assert segment.tokens.media == (MediaSpan(0, 1, (1, 1), key=3),)


def test_a_micro_batch_that_lacks_images_gets_one_that_nothing_sees():
    packed = laid_out([[TEXT, OTHER], [TEXT]], 0, IMAGES, lacks=True)
    assert packed.input_ids_NT.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, IMAGE, 0]]
    assert packed.media.read.values.flatten().tolist() == [3]
    plain_rows = packed_rows([[TEXT, OTHER], [TEXT]], 0)
    assert torch.equal(packed.target_ids_M, plain_rows.target_ids_M)
    assert torch.equal(packed.predictor_M, plain_rows.predictor_M)
    assert packed.dense_mask()[1, 0].tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, True, True, False, False],
        [False, False, False, True, False],
        [False, False, False, False, True],
    ]


def test_in_rows_of_one_document_it_has_a_row_of_its_own():
    padded = laid_out([[TEXT], [OTHER]], 0, IMAGES, lacks=True)
    assert padded.input_ids_NT.tolist() == [[1, 2, 3], [4, 5, 0], [IMAGE, 0, 0]]
    assert padded.segments is None
    assert padded.sequence_M.tolist() == [0, 1] and padded.end_B.tolist() == [2, 4]
    empty = laid_out([], 0, IMAGES, lacks=True)
    assert empty.input_ids_NT.tolist() == [[IMAGE]] and empty.target_ids_M.numel() == 0


def test_a_picture_that_was_cut_up_stays_whole():
    """Its parts have one key; the tokens between them come along."""
    cut_up = document([5, IMAGE, 6, IMAGE, 7], MediaSpan(1, 1, key=3), MediaSpan(3, 1, key=3))
    (segment,) = RowImages(pixels_of, (LARGE, cut_up)).alone.segments
    assert segment.tokens.input_ids.tolist() == [IMAGE, 6, IMAGE]
    assert [(image.begin, image.key) for image in segment.tokens.media] == [(0, 3), (2, 3)]
