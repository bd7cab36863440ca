"""Parallel paths as segments: the rule token by token, prompts that quote tags, cut texts, and every malformed one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from threestep.plugins.parallel_thinking.layout import (
    Block,
    MalformedBlocks,
    drawn_blocks,
    drawn_document,
    find_blocks,
    parallel_document,
    shared_prompt_in_parallel,
)
from threestep.plugins.parallel_thinking.tests.parallel_texts import TAGS, Path, Text, some_ids, texts
from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt, unshared
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows

P, Q, A, B, C, D = 10, 11, 12, 13, 14, 15
OPEN, PATH, END_PATH, CLOSE = 3, 4, 5, 6


def mask_of(rows: TokenRows) -> torch.Tensor:
    """bool [T, T] of the first row."""
    mask, width = rows.dense_mask(), rows.input_ids_NT.shape[1]
    return torch.ones(width, width, dtype=torch.bool).tril() if mask is None else mask[0, 0]


def assert_laid_out(document: Document, ids: list[int], positions: list[int], mask: torch.Tensor) -> TokenRows:
    rows = packed_rows([[document]], 0)
    assert rows.input_ids_NT[0].tolist() == ids  # every token once, where it stands in the text
    assert rows.position_ids_NT[0].tolist() == positions
    assert torch.equal(mask_of(rows), mask)
    return rows


def test_the_worked_example():
    """The one of the module's docstring: p q ( < a b > < c > ) d."""
    sequence = Text().trunk(P, Q).block(Path([A, B]), Path([C])).trunk(D).sequence()
    document = parallel_document(sequence, TAGS)
    assert [part.tokens.input_ids.tolist() for part in document.segments] == [
        [P, Q, OPEN],
        [PATH, A, B, END_PATH],
        [PATH, C, END_PATH],
        [CLOSE, D],
    ]
    assert [part.sees for part in document.segments] == [(), (0,), (0,), (0, 1, 2)]
    assert [part.first_position for part in document.segments] == [0, 3, 3, 7]
    assert [part.predecessor for part in document.segments] == [None, 0, 0, 2]
    assert (document.ends, document.owners) == ((3,), ((0,),) * 4)
    rows = packed_rows([[document]], 0)
    assert rows.position_ids_NT.tolist() == [[0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 7, 8]]
    assert rows.target_ids_M.tolist() == [Q, OPEN, PATH, A, B, END_PATH, PATH, C, END_PATH, CLOSE, D]
    assert rows.predictor_M.tolist() == [0, 1, 2, 3, 4, 5, 2, 7, 8, 9, 10]
    assert rows.end_B.tolist() == [11]


def test_text_between_paths_belongs_to_the_path_before_it():
    """And text before the first path to the opening. The longest path is counted with what follows it."""
    text = Text().trunk(P).block(Path([A], [B, B]), Path([C, C], [D]), opening=[Q])
    document = parallel_document(text.sequence(), TAGS)
    assert [part.tokens.input_ids.tolist() for part in document.segments] == [
        [P, OPEN, Q],
        [PATH, A, END_PATH, B, B],
        [PATH, C, C, END_PATH, D],
        [CLOSE],
    ]
    assert [part.first_position for part in document.segments] == [0, 3, 3, 8]


@settings(max_examples=80, deadline=None)
@given(texts(), st.data())
def test_the_layout_is_the_rule(text, data):
    """Token by token: order, positions, who sees whom, what each target is predicted from."""
    targets = [data.draw(st.booleans()) for _ in text.ids[1:]]
    sequence = TokenSequence(torch.tensor(text.ids), torch.tensor([False, *targets]))
    rows = assert_laid_out(parallel_document(sequence, TAGS), text.ids, text.positions, text.mask())
    wanted = [column for column, is_target in enumerate([False, *targets]) if is_target]
    assert rows.target_ids_M.tolist() == [text.ids[column] for column in wanted]
    assert rows.predictor_M.tolist() == [text.predecessors[column] for column in wanted]
    assert rows.sequence_M.tolist() == [0] * len(wanted) and rows.end_B.tolist() == [len(text.ids) - 1]


@settings(max_examples=60, deadline=None)
@given(texts(), st.data())
def test_a_cut_text_is_the_beginning_of_the_whole_one(text, data):
    """Truncation changes nothing of what it leaves."""
    kept = data.draw(st.integers(1, len(text.ids)))
    whole = text.sequence()
    cut = TokenSequence(whole.input_ids[:kept], whole.is_target[:kept])
    rows = assert_laid_out(
        parallel_document(cut, TAGS), text.ids[:kept], text.positions[:kept], text.mask()[:kept, :kept]
    )
    assert rows.predictor_M.tolist() == text.predecessors[1:kept]
    assert rows.end_B.tolist() == [kept - 1]


@settings(max_examples=30, deadline=None)
@given(some_ids(1, 8))
def test_without_blocks_it_is_a_plain_document(ids):
    sequence = Text().trunk(*ids).sequence()
    ours, theirs = parallel_document(sequence, TAGS), plain(sequence)
    assert_laid_out(ours, ids, list(range(len(ids))), torch.ones(len(ids), len(ids), dtype=torch.bool).tril())
    assert (ours.ends, ours.owners, len(ours.segments)) == (theirs.ends, theirs.owners, 1)


def test_one_path_alone_is_causal():
    (alone,) = unshared(parallel_document(Text().trunk(P).block(Path([A, B])).trunk(D).sequence(), TAGS))
    assert len(alone.segments) == 1 and alone.tokens == 8
    assert bool(alone.segments[0].tokens.is_target[1:].all())


def test_tags_that_a_prompt_quotes_are_text():
    """Malformed as they stand: only what the model writes is parsed."""
    quoted = [P, OPEN, PATH, OPEN, Q]
    text = Text().trunk(*quoted).block(Path([A]), Path([B])).trunk(D)
    sequence = text.sequence(first_target=len(quoted))
    assert_laid_out(parallel_document(sequence, TAGS, sequence.is_target), text.ids, text.positions, text.mask())
    with pytest.raises(MalformedBlocks, match="token 3: a block opens inside a block"):
        parallel_document(sequence, TAGS)


def test_a_block_does_not_go_on_through_what_another_wrote():
    """Two turns of a conversation: each path is closed, the block goes on behind what the user said."""
    ids = torch.tensor([P, OPEN, PATH, A, END_PATH, Q, Q, PATH, B, END_PATH, CLOSE])
    is_written = torch.ones(len(ids), dtype=torch.bool)
    assert len(find_blocks(ids, TAGS, is_written)) == 1
    is_written[5:7] = False
    for given_ids, mask in ((ids, is_written), (ids[:8], is_written[:8])):
        with pytest.raises(MalformedBlocks, match="token 5: a block holds text that the model does not write"):
            find_blocks(given_ids, TAGS, mask, cut=True)


@settings(max_examples=60, deadline=None)
@given(some_ids(1), st.lists(texts(most_blocks=2), min_size=1, max_size=3))
def test_responses_with_blocks_share_their_prompt(prompt_ids, responses):
    """Each response is laid out as behind its own copy of the prompt, and by itself again in `unshared`."""
    prompt = TokenSequence(torch.tensor(prompt_ids), torch.zeros(len(prompt_ids), dtype=torch.bool))
    document = shared_prompt_in_parallel(prompt, [text.sequence(first_target=0) for text in responses], TAGS)
    assert document.tokens == len(prompt_ids) + sum(len(text.ids) for text in responses)
    rows = packed_rows([[document]], 0)
    mask, length = mask_of(rows), len(prompt_ids)
    start = length
    for number, (text, alone) in enumerate(zip(responses, unshared(document), strict=True)):
        whole = Text().trunk(*prompt_ids)
        own = slice(start, start + len(text.ids))
        columns = [*range(length), *range(own.start, own.stop)]
        expected = torch.ones(length + len(text.ids), length + len(text.ids), dtype=torch.bool).tril()
        expected[length:, length:] = text.mask()
        assert torch.equal(mask[columns][:, columns], expected)
        assert not mask[own, length:start].any() and not mask[own, own.stop :].any()
        positions = [*range(length), *(length + position for position in text.positions)]
        assert rows.position_ids_NT[0, columns].tolist() == positions
        by_itself = assert_laid_out(alone, [*whole.ids, *text.ids], positions, expected)
        before = [length - 1, *(length + column for column in text.predecessors[1:])]
        assert by_itself.predictor_M.tolist() == before
        mine = rows.sequence_M == number
        assert rows.target_ids_M[mine].tolist() == text.ids
        assert rows.predictor_M[mine].tolist() == [columns[column] for column in before]
        assert int(rows.end_B[number]) == own.stop - 1
        start = own.stop


def test_responses_without_blocks_are_a_shared_prompt():
    prompt = TokenSequence(torch.tensor([P, Q]), torch.zeros(2, dtype=torch.bool))
    responses = [Text().trunk(A, B).sequence(0), Text().trunk(C).sequence(0)]
    ours, theirs = shared_prompt_in_parallel(prompt, responses, TAGS), shared_prompt(prompt, responses)
    for name in ("sees", "first_position", "predecessor"):
        assert [getattr(part, name) for part in ours.segments] == [getattr(part, name) for part in theirs.segments]
    assert (ours.ends, ours.owners) == (theirs.ends, theirs.owners)


MALFORMED = {
    "a block opens inside a block": ([P, OPEN, PATH, A, OPEN], 4),
    "a path opens outside a block": ([P, PATH], 1),
    "a path opens inside a path": ([OPEN, PATH, A, PATH], 3),
    "a path closes that was not opened": ([OPEN, PATH, A, END_PATH, END_PATH], 4),
    "a path is empty": ([OPEN, PATH, END_PATH], 2),
    "a block closes that was not opened": ([P, CLOSE], 1),
    "a block closes before its last path": ([OPEN, PATH, A, CLOSE], 3),
    "a block has no paths": ([P, OPEN, Q, CLOSE], 3),
}


@pytest.mark.parametrize(("reason", "given_ids"), MALFORMED.items(), ids=[name.replace(" ", "_") for name in MALFORMED])
def test_malformed_blocks(reason, given_ids):
    ids, column = given_ids
    for cut in (False, True):
        with pytest.raises(MalformedBlocks, match=f"^token {column}: {reason}$"):
            find_blocks(torch.tensor(ids), TAGS, cut=cut)
    with pytest.raises(MalformedBlocks, match=reason):
        parallel_document(TokenSequence(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.bool)), TAGS)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([OPEN], "token 1: the text ends in an open block"),
        ([OPEN, PATH, A], "token 3: the text ends in an open path"),
        ([OPEN, PATH, A, END_PATH, B], "token 5: the text ends in an open block"),
    ],
    ids=["block", "path", "behind a path"],
)
def test_a_block_that_is_never_closed(ids, reason):
    with pytest.raises(MalformedBlocks, match=reason):
        find_blocks(torch.tensor(ids), TAGS)
    assert find_blocks(torch.tensor(ids), TAGS, cut=True)[0].end is None


@settings(max_examples=60, deadline=None)
@given(texts(text_behind=False), st.data())
def test_blocks_of_a_drawn_text_are_those_of_a_written_one(text, data):
    """Of a well-formed text whose paths end with their tag, whole or cut anywhere."""
    ids = torch.tensor(text.ids)
    assert drawn_blocks(ids, TAGS) == find_blocks(ids, TAGS)
    cut = ids[: data.draw(st.integers(1, len(ids)))]
    written = [block for block in find_blocks(cut, TAGS, cut=True) if block.paths]
    assert list(drawn_blocks(cut, TAGS)) == written


@pytest.mark.parametrize(
    ("ids", "blocks"),
    [
        ([PATH, A, END_PATH, CLOSE, A], ()),  # tags in the trunk
        ([OPEN, END_PATH, OPEN, CLOSE, PATH, A, END_PATH, CLOSE], (Block((4,), 7),)),  # in an opening
        ([OPEN, PATH, PATH, OPEN, CLOSE, END_PATH, PATH, END_PATH, CLOSE], (Block((1, 6), 8),)),  # in a path
        ([OPEN, PATH, A, END_PATH, B, PATH, A, END_PATH], (Block((1,), 4),)),  # text behind a path ends the block
        ([OPEN, PATH, A, END_PATH], (Block((1,), None),)),  # cut behind a path
        ([OPEN, PATH, A, END_PATH, PATH], (Block((1, 4), None),)),
        ([OPEN, PATH], (Block((1,), None),)),
        ([OPEN, A, A], ()),
        (
            [OPEN, PATH, END_PATH, CLOSE, OPEN, PATH, END_PATH, OPEN, PATH, A],
            (Block((1,), 3), Block((5,), 7), Block((8,), None)),
        ),
    ],
)
def test_a_tag_out_of_place_is_text_in_a_drawn_text(ids, blocks):
    assert drawn_blocks(torch.tensor(ids), TAGS) == blocks


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([OPEN, PATH, END_PATH, CLOSE, A, B]), min_size=1, max_size=14), some_ids(1))
def test_a_drawn_response_lies_behind_its_prompt(ids, prompt_ids):
    """Whatever it is: its tokens as they stand, alone and beside another response, which changes nothing."""
    prompt, response = Text().trunk(*prompt_ids).sequence(99), Text().trunk(*ids).sequence(0)
    rows = packed_rows([[drawn_document(prompt, [response], TAGS)]], 0)
    assert rows.input_ids_NT[0].tolist() == [*prompt_ids, *ids] and rows.target_ids_M.tolist() == ids
    first, *others = unshared(drawn_document(prompt, [response, response], TAGS))
    assert len(others) == 1
    for alone in (first, *others):
        shared = packed_rows([[alone]], 0)
        assert shared.input_ids_NT.tolist() == rows.input_ids_NT.tolist()
        assert shared.position_ids_NT.tolist() == rows.position_ids_NT.tolist()
        assert torch.equal(mask_of(shared), mask_of(rows)) and torch.equal(shared.predictor_M, rows.predictor_M)
