"""Images in sequences, documents and rows: positions worked by hand, and what cutting and joining keeps."""

from __future__ import annotations

import pytest
import torch

from training.utils.contracts.documents import (
    MediaSpan,
    TokenSequence,
    media_between,
    plain,
    positions_taken,
    shared_prompt,
    together,
    unshared,
)
from training.utils.contracts.token_rows import position_axes
from training.utils.layout.rows import packed_rows


def run(length, *images, is_target=False):
    return TokenSequence(torch.arange(length), torch.full((length,), is_target), images)


def image(begin, height, width, key=0):
    return MediaSpan(begin, height * width, (height, width), key)


@pytest.mark.parametrize(
    ("length", "images", "time", "height", "width"),
    [
        # Two tokens, 2 x 3 of an image, two tokens: text goes on at 2 + max(2, 3).
        (10, [image(2, 2, 3)], "0 1 222222 5 6", "0 1 222333 5 6", "0 1 234234 5 6"),
        # 3 x 1 at the very beginning, one token, 1 x 2, one token: 0 + 3, then 3 + 1, then 4 + 2.
        (7, [image(0, 3, 1), image(4, 1, 2)], "000 3 44 6", "012 3 44 6", "000 3 45 6"),
        # Two images without a token between them: the second begins at 1 + 2.
        (8, [image(1, 2, 2), image(5, 1, 3)], "0 1111 333", "0 1122 333", "0 1212 345"),
        # One token as an image counts as a text; an image without sides does.
        (5, [image(1, 1, 1), MediaSpan(2, 2)], "0 1 2 3 4", "0 1 2 3 4", "0 1 2 3 4"),
        (3, [], "012", "012", "012"),
    ],
)  # fmt: skip
def test_positions_worked_by_hand(length, images, time, height, width):
    axes_3T = position_axes(length, images)
    expected = [[int(digit) for digit in axis.replace(" ", "")] for axis in (time, height, width)]
    assert axes_3T.tolist() == expected
    taken = positions_taken(length, images)
    assert taken == max(map(max, expected)) + 1
    # What follows goes on there.
    assert position_axes(length + 1, images)[:, -1].tolist() == [taken] * 3


def test_a_span_is_as_large_as_its_grid():
    with pytest.raises(AssertionError, match=r"a medium of 5 tokens cannot be a grid of \(2, 3\)"):
        MediaSpan(0, 5, (2, 3))


def test_parts_of_a_sequence_keep_their_images_and_cut_none():
    images = (image(1, 2, 2, key=7), image(6, 1, 2, key=8))
    assert media_between(images, 1, 6) == (image(0, 2, 2, key=7),)
    assert media_between(images, 5, 9) == (image(1, 1, 2, key=8),)
    assert media_between(images, 5, 6) == ()
    whole = run(9, *images)
    parts = [whole.part(0, 5), whole.part(5, 6), whole.part(6, 9)]
    assert together(parts).media == images and together(parts).input_ids.equal(whole.input_ids)
    for cut in (2, 7):
        for begin, end in ((0, cut), (cut, 9)):
            with pytest.raises(AssertionError, match="cut a medium"):
                whole.part(begin, end)


def test_responses_go_on_from_the_largest_position_of_a_prompt():
    prompt = run(8, image(1, 2, 3))  # positions 0, 1..3 and 4: 8 tokens, 5 positions
    document = shared_prompt(prompt, [run(2, is_target=True), run(3, is_target=True)])
    rows = packed_rows([[plain(run(2)), document]], 0)
    assert [part.first_position for part in document.segments] == [0, 5, 5]
    assert rows.media.axes_3NT[0, 0].tolist() == [0, 1, 0, 1, 1, 1, 1, 1, 1, 4, 5, 6, 5, 6, 7]
    assert rows.media.axes_3NT[1, 0].tolist() == [0, 1, 0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 5, 6, 7]
    assert rows.media.axes_3NT[2, 0].tolist() == [0, 1, 0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 5, 6, 7]
    for alone, response in zip(unshared(document), (2, 3), strict=True):
        (segment,) = alone.segments
        axes_3T = position_axes(len(segment.tokens), segment.tokens.media)
        assert axes_3T[:, 8:].tolist() == [list(range(5, 5 + response))] * 3


def test_images_of_rows_stand_in_the_order_of_their_tokens():
    first = shared_prompt(run(8, image(1, 1, 2, key=3), image(5, 1, 2, key=1)), [run(2, is_target=True)] * 3)
    rows = packed_rows([[first, plain(run(2))], [plain(run(4, image(0, 1, 3, key=2)))]], 0)
    assert [span.key for span in rows.media.spans] == [3, 1, 2]  # of the shared prompt once
    assert [span.key for span in packed_rows([unshared(first)], 0).media.spans] == [3, 1] * 3


def test_padding_is_where_it_is_without_images_and_rows_of_text_have_no_axes():
    texts = packed_rows([[plain(run(5))], [plain(run(2))]], 0)
    assert texts.media is None
    mixed = packed_rows([[plain(run(5, image(1, 1, 2)))], [plain(run(2))]], 0)
    assert mixed.media.axes_3NT[:, 1].tolist() == [texts.position_ids_NT[1].tolist()] * 3
    counted = packed_rows([[plain(run(5, MediaSpan(1, 2)))]], 0)
    assert counted.media.axes_3NT is None and len(counted.media.spans) == 1


def test_tokens_of_an_image_that_sees_itself_see_later_ones_of_it_alone():
    first, second = MediaSpan(1, 2, sees_itself=True), MediaSpan(3, 2, sees_itself=True)
    seen = ["100000", "111000", "111000", "111110", "111110", "111111"]
    alone = packed_rows([[plain(run(6, first, second))]], 0).dense_mask()
    assert ["".join(str(int(one)) for one in row) for row in alone[0, 0].tolist()] == seen
    document = shared_prompt(run(4, first), [run(1, is_target=True)] * 2)
    packed = packed_rows([[plain(run(2)), document], [plain(run(1))]], 0)
    seen = ["100000000", "110000000"]  # another document
    seen += ["001000000", "001110000", "001110000", "001111000", "001111100", "001111010"]
    rows = ["".join(str(int(one)) for one in row) for row in packed.dense_mask()[0, 0].tolist()]
    assert rows == [row[:8] for row in seen]
    counted = packed_rows([[plain(run(6, MediaSpan(1, 2)))]], 0)
    assert counted.media.blocks_NT is None and counted.dense_mask() is None
