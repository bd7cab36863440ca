"""Several documents in a row, and prompts that responses share: what stands where, who sees whom, what is predicted
from which position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt, unshared
from training.utils.contracts.token_rows import PAD_SEGMENT, TokenRows
from training.utils.layout.rows import packed_rows, padded_rows


def run(ids: list[int], targets: list[int] = ()) -> TokenSequence:
    is_target = torch.zeros(len(ids), dtype=torch.bool)
    is_target[list(targets)] = True
    return TokenSequence(torch.tensor(ids, dtype=torch.int64), is_target)


def test_a_shared_prompt_beside_a_plain_document_by_hand():
    """Row 0: prompt [5 6], responses [7* 8*] and [9*]. Row 1: [4 3*], then two of padding."""
    pair = shared_prompt(run([5, 6]), [run([7, 8], [0, 1]), run([9], [0])])
    rows = packed_rows([[pair], [plain(run([4, 3], [1]))]], pad_token_id=1)
    assert rows.input_ids_NT.tolist() == [[5, 6, 7, 8, 9], [4, 3, 1, 1, 1]]
    assert rows.position_ids_NT.tolist() == [[0, 1, 2, 3, 2], [0, 1, 0, 0, 0]]
    assert rows.segment_ids_NT.tolist() == [[0, 0, 1, 1, 2], [0, 0, -1, -1, -1]]
    # 7 and 9 are both predicted by 6, at 1; 8 by 7, at 2; 3 by 4, at 1 * 5 + 0.
    assert rows.target_ids_M.tolist() == [7, 8, 9, 3]
    assert rows.predictor_M.tolist() == [1, 2, 1, 5]
    assert rows.sequence_M.tolist() == [0, 0, 1, 2]
    assert rows.end_B.tolist() == [3, 4, 6]
    assert int((rows.segment_ids_NT >= 0).sum()) == 7 and rows.before_NT is None  # not asked for
    numbers = [field for field in vars(rows).values() if isinstance(field, torch.Tensor)]
    assert all(field.dtype == torch.int64 for field in [*numbers, rows.segments.copies_NS])
    assert rows.segments.visible_NSS.dtype == torch.bool
    seen, other = rows.dense_mask()[:, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],  # the second response sees the prompt and itself, not the first
    ]
    assert other == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],  # padding sees padding, and no row of the mask is empty
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_padding_takes_no_position_that_a_model_may_lack():
    """Six responses of a prompt make a document longer than any sequence in it: the row beside it is padded to a width
    that may be above the model's positions."""
    wide = shared_prompt(run([5, 6]), [run([7, 8, 9], [0])] * 6)
    rows = packed_rows([[wide], [plain(run([4, 3], [1]))]], 0)
    assert rows.input_ids_NT.shape == (2, 20)
    assert int(rows.position_ids_NT.max()) == 4


def test_where_no_mask_is_needed_positions_count_on():
    """A position that starts again would read as a packed sequence to transformers."""
    rows = packed_rows([[plain(run([5, 6, 7], [1]))], [plain(run([8], []))]], 0)
    assert rows.segments is None and rows.dense_mask() is None
    assert rows.position_ids_NT.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("lay_out", [packed_rows, padded_rows])
def test_nothing_gives_a_row_of_padding_without_targets(lay_out):
    rows = lay_out([], pad_token_id=7)
    assert rows.input_ids_NT.tolist() == [[7]] and rows.segment_ids_NT.tolist() == [[PAD_SEGMENT]]
    assert rows.segments is None
    for name in ("target_ids_M", "predictor_M", "sequence_M", "end_B"):
        assert getattr(rows, name).shape == (0,) and getattr(rows, name).dtype == torch.int64


@st.composite
def documents(draw) -> Document:
    def drawn(least: int, may_start: bool) -> TokenSequence:
        ids = draw(st.lists(st.integers(1, 50), min_size=least, max_size=5))
        targets = [draw(st.booleans()) and (index > 0 or may_start) for index in range(len(ids))]
        return TokenSequence(torch.tensor(ids), torch.tensor(targets))

    responses = draw(st.integers(0, 4))
    if responses == 0:
        return plain(drawn(1, False))
    return shared_prompt(drawn(1, False), [drawn(1, True) for _ in range(responses)])


packings = st.lists(st.lists(documents(), min_size=1, max_size=3), min_size=1, max_size=3)


def places(row: list[Document]) -> list[tuple[int, int, int]]:
    """(document, segment, index in the segment) of every token of a row."""
    return [
        (place, index, column)
        for place, document in enumerate(row)
        for index, segment in enumerate(document.segments)
        for column in range(len(segment.tokens))
    ]


@settings(max_examples=60, deadline=None)
@given(packings)
def test_the_dense_mask_is_the_rule_of_who_sees_whom(packing):
    """Token by token: the same segment before me, or a segment that mine sees; padding sees padding before it."""
    rows = packed_rows(packing, 0)
    mask = rows.dense_mask()
    if mask is None:
        assert all(len(row) == 1 and len(row[0].segments) == 1 for row in packing)
        return
    width = rows.input_ids_NT.shape[1]
    assert mask.shape == (len(packing), 1, width, width) and mask.dtype == torch.bool
    for n, row in enumerate(packing):
        tokens = places(row)
        expected = torch.zeros(width, width, dtype=torch.bool)
        for here in range(width):
            for there in range(here + 1):
                if here >= len(tokens) or there >= len(tokens):
                    expected[here, there] = here >= len(tokens) and there >= len(tokens)
                    continue
                (document, segment, _), (other, other_segment, _) = tokens[here], tokens[there]
                sees = row[document].segments[segment].sees
                expected[here, there] = document == other and (segment == other_segment or other_segment in sees)
        assert torch.equal(mask[n, 0], expected)


@settings(max_examples=60, deadline=None)
@given(packings)
def test_every_sequence_is_found_again_in_the_rows(packing):
    """Read back from the rows by mask and positions alone, each sequence is what `unshared` makes of it."""
    rows = packed_rows(packing, 0)
    sequences = [alone.segments[0].tokens for row in packing for item in row for alone in unshared(item)]
    width = rows.input_ids_NT.shape[1]
    mask = rows.dense_mask()
    assert rows.end_B.numel() == len(sequences)
    for number, (end, sequence) in enumerate(zip(rows.end_B.tolist(), sequences, strict=True)):
        n, t = divmod(end, width)
        seen = torch.arange(t + 1) if mask is None else torch.nonzero(mask[n, 0, t]).flatten()
        assert rows.input_ids_NT[n, seen].tolist() == sequence.input_ids.tolist()
        assert rows.position_ids_NT[n, seen].tolist() == list(range(len(sequence)))
        own = rows.sequence_M == number
        assert rows.target_ids_M[own].tolist() == sequence.input_ids[sequence.is_target].tolist()
        # each target is predicted where the token before it stands
        before = [n * width + int(seen[column - 1]) for column in torch.nonzero(sequence.is_target).flatten().tolist()]
        assert rows.predictor_M[own].tolist() == before
    assert int((rows.segment_ids_NT >= 0).sum()) == sum(item.tokens for row in packing for item in row)
    assert rows.sequence_M.tolist() == sorted(rows.sequence_M.tolist())


@settings(max_examples=30, deadline=None)
@given(st.lists(documents(), min_size=1, max_size=4), st.integers(1, 30))
def test_one_sequence_a_row_is_padded_rows(items, min_width):
    alone = [sequence for item in items for sequence in unshared(item)]
    packed = packed_rows([[sequence] for sequence in alone], 0, min_width)
    padded = padded_rows([sequence.segments[0].tokens for sequence in alone], 0, min_width)
    assert isinstance(packed, TokenRows) and packed.segments is None
    for name, field in vars(padded).items():
        other = getattr(packed, name)
        assert torch.equal(field, other) if isinstance(field, torch.Tensor) else field == other, name


def test_how_often_a_token_stands_in_separate_sequences():
    """A prompt of two tokens with three responses, then a sequence, then padding; and padded rows."""

    def tokens(count: int) -> TokenSequence:
        return TokenSequence(torch.arange(count), torch.zeros(count, dtype=torch.bool))

    shared = shared_prompt(tokens(2), [tokens(1), tokens(2), tokens(1)])
    assert shared.copies == (3, 1, 1, 1)
    rows = packed_rows([[shared, plain(tokens(3))]], pad_token_id=0, min_width=11)
    assert rows.copies_NT().tolist() == [[3, 3, 1, 1, 1, 1, 1, 1, 1, 0, 0]]
    assert packed_rows([[plain(tokens(2))], [plain(tokens(1))]], 0).copies_NT().tolist() == [[1, 1], [1, 0]]
    assert rows.without_targets().target_ids_M.numel() == 0


def test_a_mask_that_no_machine_holds_is_refused():
    rows = packed_rows([[plain(run([1] * 50_000)), plain(run([2] * 50_000))]], pad_token_id=0)
    with pytest.raises(ThreestepError, match=r"a mask of 100,000 x 100,000 tokens for 1 row takes 10 GB, at most 9 ar"):
        rows.dense_mask()
