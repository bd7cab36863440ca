"""Rows with images: pixels, an image for a micro-batch without one, shares of ranks, and the check of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.vision_models import FAMILIES, awake, sequence, with_pixels
from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.images.pixels import ImagePixels
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import MediaSpan, TokenSequence, join, plain
from training.utils.layout.planner import PlanSettings
from training.utils.layout.rows import lacks_media, laid_out, packed_rows
from training.utils.layout.trie import SequenceLayout, rank_share
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
        "an image changes what it computes for another document"
    )
    assert own.with_media.why_not(lambda rows: numbers_M, CPU, None) == (
        "replacing an image changes nothing that it computes"
    )


def test_what_is_not_made_for_the_model_is_told(family):
    examples = (row(family, 2, "image 0", 4),)

    def of_another_size(keys):
        pixels = family.pixels(keys)
        return replace(pixels, values=pixels.values[..., :-1])

    with pytest.raises(
        ThreestepError, match="cannot be used with images: its own forward pass on a row with images failed"
    ):
        read_own_forward(family.model, media=RowImages(of_another_size, examples))


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


def test_the_smallest_image_stands_alone_and_whole():
    """Its parts have one key; the tokens between them come along."""
    (segment,) = IMAGES.alone.segments
    assert segment.tokens.input_ids.tolist() == [IMAGE]
    assert not segment.tokens.is_target.any()
    assert segment.tokens.media == (MediaSpan(0, 1, (1, 1), key=3),)
    cut_up = document([5, IMAGE, 6, IMAGE, 7], MediaSpan(1, 1, key=3), MediaSpan(3, 1, key=3))
    (segment,) = RowImages(pixels_of, (LARGE, cut_up)).alone.segments
    assert segment.tokens.input_ids.tolist() == [IMAGE, 6, IMAGE]
    assert [(image.begin, image.key) for image in segment.tokens.media] == [(0, 3), (2, 3)]


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


PAD = 2


@pytest.mark.parametrize("packed", [True, False])
def test_a_rank_without_images_gets_one_where_another_has_some(packed):
    """Three samples of a prompt with an image, one in a forward beside a text: rows have its pixels once for each
    document, and the image that is added is no sequence."""
    spans = (MediaSpan(1, 2, (1, 2), key=5),)
    samples = [replace(join(torch.arange(4), torch.arange(3) + 50 + own), media=spans) for own in range(3)]
    texts = [join(torch.arange(6) + 10, torch.arange(2) + 60)]
    images = RowImages(lambda keys: ImagePixels(torch.tensor(keys)[:, None]), (plain(samples[0]),))
    plan = PlanSettings(2, 13, 8, True, 13) if packed else PlanSettings(2, max_rows_per_micro_batch=2)
    shares = [rank_share([*samples, *texts], SequenceLayout(plan, PAD, rank, images), CPU) for rank in range(2)]
    assert sorted(index for laid in shares for indices, _ in laid for index in indices) == [0, 1, 2, 3]
    added = 0
    for laid in zip(*shares, strict=True):
        assert len({rows.media is not None for _, rows in laid}) == 1
        for indices, rows in laid:
            own = sum(index < 3 for index in indices)
            documents = min(own, 1) if packed else own
            added += rows.media is not None and not own
            assert len(rows.end_B) == len(indices) and (rows.media is not None or not documents)
            if rows.media is not None:
                assert len(rows.media.spans) == max(documents, 1)
                assert rows.media.read.values.flatten().tolist() == [5] * len(rows.media.spans)
    assert added == (1 if packed else 0)
