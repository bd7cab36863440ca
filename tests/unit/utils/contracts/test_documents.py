"""Segments, documents and rows: who sees whom, whose target is whose, what each sequence is by itself, where images
stand, and what may be seen through runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.utils.contracts.documents import (
    Document,
    MediaSpan,
    Segment,
    TokenSequence,
    first_alike,
    join,
    media_between,
    plain,
    positions_taken,
    shared_prompt,
    together,
    unshared,
)
from training.utils.contracts.token_rows import AttentionRun, RunSpan, position_axes, runs_of
from training.utils.layout.rows import packed_rows


def run(ids: int | list[int], targets: Sequence[int] = (), *images: MediaSpan) -> TokenSequence:
    """ids: the tokens, or how many"""
    drawn = torch.tensor(ids, dtype=torch.int64) if isinstance(ids, list) else torch.arange(ids)
    is_target = torch.zeros(len(drawn), dtype=torch.bool)
    is_target[list(targets)] = True
    return TokenSequence(drawn, is_target, images)


def answer(length: int) -> TokenSequence:
    return run(length, range(length))


def shared(prompt: int, *responses: int) -> Document:
    return shared_prompt(run(prompt), [answer(length) for length in responses])


def image(begin: int, height: int, width: int, key: int = 0) -> MediaSpan:
    return MediaSpan(begin, height * width, (height, width), key)


def told(document: Document) -> list[tuple[list[int], list[int]]]:
    """Ids and targets of a document's segments."""
    return [(part.tokens.input_ids.tolist(), part.tokens.is_target.int().tolist()) for part in document.segments]


def test_a_plain_document_is_its_own_sequence():
    document = plain(join(torch.tensor([5, 6]), torch.tensor([7])))
    assert told(document) == told(*unshared(document)) == [([5, 6, 7], [0, 0, 1])]
    (segment,) = document.segments
    assert (segment.sees, segment.first_position, segment.predecessor) == ((), 0, None)
    assert (document.ends, document.owners, document.tokens) == ((0,), ((0,),), 3)


def test_a_prompt_with_three_responses():
    document = shared_prompt(run([5, 6]), [run([7, 8], [0, 1]), run([9], [0]), run([1, 2, 3], [0])])
    told_of = [(part.sees, part.first_position, part.predecessor) for part in document.segments]
    assert told_of == [((), 0, None), *[((0,), 2, 0)] * 3]
    assert (document.ends, document.owners) == ((1, 2, 3), ((0,), (0,), (1,), (2,)))
    assert document.tokens == 8  # the prompt once


def test_each_sequence_by_itself():
    """A prompt that is to be predicted too is predicted once: by the first sequence."""
    first, second = unshared(shared_prompt(run([5, 6, 4], [1, 2]), [run([7, 8], [0, 1]), run([9, 2], [1])]))
    assert told(first) == [([5, 6, 4, 7, 8], [0, 1, 1, 1, 1])]
    assert told(second) == [([5, 6, 4, 9, 2], [0, 0, 0, 0, 1])]
    assert first.ends == second.ends == (0,)


FIRST, EMPTY = "has no predecessor and cannot be a target", "no tokens"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: plain(run([5, 6], [0])), FIRST),
        (lambda: shared_prompt(run([5, 6], [0]), [run([7], [0])]), FIRST),
        (lambda: Document((Segment(run([5], [0])),), (0,), (0,)), FIRST),
        (lambda: plain(run([])), EMPTY),
        (lambda: shared_prompt(run([]), [run([7], [0])]), EMPTY),
        (lambda: shared_prompt(run([5]), [run([])]), EMPTY),
        (lambda: MediaSpan(0, 5, (2, 3)), r"a medium of 5 tokens cannot have the grid \(2, 3\)"),
    ],
)
def test_what_another_documents_tokens_would_stand_for_is_refused(make, words):
    """A first target would be predicted from the document before it in the row; an empty segment's end is another's."""
    with pytest.raises(AssertionError, match=words):
        make()


def test_sequences_that_a_model_reads_alike():
    """Whatever is to be predicted of them."""
    one, other = (MediaSpan(0, 1, key=key) for key in (1, 2))
    ids = torch.tensor([5, 6, 7])
    with_images = [TokenSequence(ids, ids > 5, (each,)) for each in (one, other, one)]
    forked = [TokenSequence(ids, ids > 5, forks=forks) for forks in ((1,), (2,), (1,))]
    sequences = [run([5, 6, 7], [2]), run([5, 6]), run([5, 6, 7]), *with_images, *forked, run([5, 6])]
    assert first_alike(sequences) == [0, 1, 0, 3, 4, 3, 6, 7, 6, 1]


# --- images


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
    expected = [[int(digit) for digit in axis.replace(" ", "")] for axis in (time, height, width)]
    assert position_axes(length, images).tolist() == expected
    taken = positions_taken(length, images)
    assert taken == max(map(max, expected)) + 1
    assert position_axes(length + 1, images)[:, -1].tolist() == [taken] * 3  # what follows goes on there


def test_parts_of_a_sequence_keep_their_images_and_cut_none():
    images = (image(1, 2, 2, key=7), image(6, 1, 2, key=8))
    assert media_between(images, 1, 6) == (image(0, 2, 2, key=7),)
    assert media_between(images, 5, 9) == (image(1, 1, 2, key=8),)
    assert media_between(images, 5, 6) == ()
    whole = run(9, (), *images)
    parts = [whole.part(0, 5), whole.part(5, 6), whole.part(6, 9)]
    assert together(parts).media == images and together(parts).input_ids.equal(whole.input_ids)
    for begin, end in ((0, 2), (2, 9), (0, 7), (7, 9)):
        with pytest.raises(AssertionError, match="cut a medium"):
            whole.part(begin, end)


def test_responses_go_on_from_the_largest_position_of_a_prompt():
    prompt = run(8, (), image(1, 2, 3))  # positions 0, 1..3 and 4: 8 tokens, 5 positions
    document = shared_prompt(prompt, [answer(2), answer(3)])
    assert [part.first_position for part in document.segments] == [0, 5, 5]
    assert packed_rows([[plain(run(2)), document]], 0).media.axes_3NT[:, 0].tolist() == [
        [0, 1, 0, 1, 1, 1, 1, 1, 1, 4, 5, 6, 5, 6, 7],
        [0, 1, 0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 5, 6, 7],
        [0, 1, 0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 5, 6, 7],
    ]
    for alone, response in zip(unshared(document), (2, 3), strict=True):
        (segment,) = alone.segments
        axes_3T = position_axes(len(segment.tokens), segment.tokens.media)
        assert axes_3T[:, 8:].tolist() == [list(range(5, 5 + response))] * 3


def test_images_of_rows_stand_in_the_order_of_their_tokens():
    first = shared_prompt(run(8, (), image(1, 1, 2, key=3), image(5, 1, 2, key=1)), [answer(2)] * 3)
    rows = packed_rows([[first, plain(run(2))], [plain(run(4, (), image(0, 1, 3, key=2)))]], 0)
    assert [span.key for span in rows.media.spans] == [3, 1, 2]  # of the shared prompt once
    assert [span.key for span in packed_rows([unshared(first)], 0).media.spans] == [3, 1] * 3


def test_padding_is_where_it_is_without_images_and_rows_of_text_have_no_axes():
    texts = packed_rows([[plain(run(5))], [plain(run(2))]], 0)
    assert texts.media is None
    mixed = packed_rows([[plain(run(5, (), image(1, 1, 2)))], [plain(run(2))]], 0)
    assert mixed.media.axes_3NT[:, 1].tolist() == [texts.position_ids_NT[1].tolist()] * 3
    counted = packed_rows([[plain(run(6, (), MediaSpan(1, 2)))]], 0)
    assert counted.media.axes_3NT is None and len(counted.media.spans) == 1
    assert counted.media.blocks_NT is None and counted.dense_mask() is None


def test_tokens_of_an_image_that_sees_itself_see_later_ones_of_it_alone():
    def seen(rows) -> list[str]:
        return ["".join(str(int(one)) for one in row) for row in rows.dense_mask()[0, 0].tolist()]

    first, second = MediaSpan(1, 2, sees_itself=True), MediaSpan(3, 2, sees_itself=True)
    alone = packed_rows([[plain(run(6, (), first, second))]], 0)
    assert seen(alone) == ["100000", "111000", "111000", "111110", "111110", "111111"]
    document = shared_prompt(run(4, (), first), [answer(1)] * 2)
    assert seen(packed_rows([[plain(run(2)), document], [plain(run(1))]], 0)) == [
        "10000000", "11000000",  # another document
        "00100000", "00111000", "00111000", "00111100", "00111110", "00111101",
    ]  # fmt: skip


# --- runs: what may be seen through them is what the dense mask shows


def test_a_shared_prompt_by_hand():
    # prompt of 4, responses of 2 and 3, another sequence of 5; the second row is a sequence of 6, padded to 14.
    rows = packed_rows([[shared(4, 2, 3), plain(run(5))], [plain(run(6))]], 0)
    assert runs_of(rows.segment_ids_NT, rows.segments.visible_NSS) == (
        AttentionRun(6, (), False),  # the prompt and the first response: causal as they stand
        AttentionRun(3, (RunSpan(0, 0, 4),), False),  # the second response sees the prompt and not the first response
        AttentionRun(5, (), False),
        AttentionRun(6, (), False),
        AttentionRun(8, (), True),
    )
    lengths = rows.lengths()
    assert lengths.begins.tolist() == [0, 6, 9, 14, 20, 28]
    assert lengths.key_begins.tolist() == [0, 6, 13, 18, 24, 32]
    assert lengths.key_tokens.tolist() == [*range(6), 0, 1, 2, 3, *range(6, 28)]
    assert (lengths.longest, lengths.longest_keys) == (8, 8)
    # They are made where the rows leave the host.
    assert rows.segments.run_lengths is None and rows.to("cpu").segments.run_lengths is None
    moved = rows.to("meta").segments.run_lengths
    assert {part.device.type for part in (moved.begins, moved.key_begins, moved.key_tokens)} == {"meta"}
    assert packed_rows([[plain(run(3)), plain(run(4))]], 0).lengths().key_tokens is None
    alone = packed_rows([[plain(run(3))], [plain(run(5))]], 0)
    assert alone.lengths() is None and alone.to("meta").segments is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3), min_size=1, max_size=3
    )
)
def test_runs_show_what_the_mask_shows(lengths):
    """lengths: of each row's documents, the prompt's and its responses'."""
    rows = packed_rows(
        [[shared(*parts) if len(parts) > 1 else plain(run(parts[0])) for parts in row] for row in lengths], 0
    )
    if rows.segments is None:
        assert rows.dense_mask() is None
        return
    runs = runs_of(rows.segment_ids_NT, rows.segments.visible_NSS)
    total, starts = rows.input_ids_NT.numel(), []
    for index in range(len(runs)):
        starts.append(starts[-1] + runs[index - 1].tokens if starts else 0)
    seen = torch.zeros(total, total, dtype=torch.bool)
    for start, each in zip(starts, runs, strict=True):
        own = slice(start, start + each.tokens)
        seen[own, own] = torch.ones(each.tokens, each.tokens, dtype=torch.bool).tril()
        for piece in each.sees:
            seen[own, starts[piece.run] + piece.start : starts[piece.run] + piece.end] = True
    width = rows.input_ids_NT.shape[1]
    for n, mask_TT in enumerate(rows.dense_mask().squeeze(1)):
        here = slice(n * width, (n + 1) * width)
        assert torch.equal(seen[here, here], mask_TT)
        assert not seen[here].sum() - seen[here, here].sum()
