"""Where the entries of multi-token prediction stand, response masks of packed rows, and zigzag slices of them."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.random_rows import random_rows
from tests.support.tries import forked_sequences
from threestep.plugins.mtp import rolled
from threestep.plugins.mtp.layout import context_slices, masks
from threestep.plugins.mtp.layout.context_slices import zigzag_slice, zigzag_unslice
from threestep.plugins.mtp.layout.entries import mtp_entries, mtp_targets
from threestep.plugins.mtp.layout.masks import whole_row_mask
from threestep.plugins.parallel_thinking.layout import parallel_document
from threestep.plugins.parallel_thinking.tests.parallel_texts import TAGS, Path, Text
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, join, plain, shared_prompt
from training.utils.layout.rows import packed_rows, padded_rows
from training.utils.layout.trie import trie_document


def test_a_row_by_hand():
    rows = packed_rows([[plain(join(torch.tensor([5, 6]), torch.tensor([7, 8])))]], 0, with_before=True)
    one, two = mtp_entries(rows, 2)
    assert one.before_L.tolist() == [0, 0, 1, 2]
    assert one.has_entry_NT.tolist() == [[False, True, True, True]]
    assert (one.rows.target_ids_M.tolist(), one.rows.predictor_M.tolist()) == ([7, 8], [1, 2])
    assert two.has_entry_NT.tolist() == [[False, False, True, True]]
    assert (two.rows.target_ids_M.tolist(), two.rows.predictor_M.tolist()) == ([8], [2])
    # Nothing looks at slot 0, and it sees itself: a row of only False gives NaN in some kernels.
    assert one.rows.dense_mask()[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]


def test_a_response_begins_with_an_entry_on_the_prompts_last_state():
    """Prompt [1 2], responses [3 4] and [5]: slots 0 to 4. Slot 2 embeds 3 and takes slot 1, as slot 4 (token 5) does.
    Token 2 of the prompt predicts 3 and 5, and has an entry; so both are targets of depth 1, beside 4."""
    prompt = TokenSequence(torch.tensor([1, 2]), torch.zeros(2, dtype=torch.bool))
    responses = [TokenSequence(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool)) for ids in ([3, 4], [5])]
    document = shared_prompt(prompt, responses)
    one, two = mtp_entries(packed_rows([[document]], 0, with_before=True), 2)
    assert one.before_L.tolist() == [0, 0, 1, 2, 1]
    assert one.rows.target_ids_M.tolist() == [3, 4, 5] and mtp_targets([document], 1) == 3
    assert two.rows.target_ids_M.tolist() == [4] and mtp_targets([document], 2) == 1  # 3 and 5 have two tokens before


def test_paths_go_on_from_the_opening_and_the_trunk_from_the_last_path():
    """Trunk of 3 with the opening tag, paths, trunk again: each path's first token takes the tag before all paths."""
    text = Text().trunk(*range(10, 13)).block(Path(range(20, 22)), Path(range(30, 33))).trunk(40, 41)
    document = parallel_document(text.sequence(), TAGS)
    rows = packed_rows([[document]], 0, with_before=True)
    (entries,) = mtp_entries(rows, 1)
    starts = [0]
    for segment in document.segments:
        starts.append(starts[-1] + len(segment.tokens))
    opening_end = starts[1] - 1
    assert [int(entries.before_L[starts[index]]) for index in (1, 2)] == [opening_end, opening_end]
    assert int(entries.before_L[starts[3]]) == starts[3] - 1
    assert int((~entries.has_entry_NT).sum()) == 1


def test_targets_are_counted_as_they_are_laid_out():
    generator = torch.Generator().manual_seed(4)
    for _ in range(30):
        lengths = torch.randint(1, 6, (4,), generator=generator).tolist()
        parts = [torch.randint(10, 60, (count,), generator=generator) for count in lengths]
        masks = [torch.rand(len(ids), generator=generator) < 0.6 for ids in parts]
        masks[0][0] = False
        prompt, *responses = (TokenSequence(ids, mask) for ids, mask in zip(parts, masks, strict=True))
        documents = [shared_prompt(prompt, responses), plain(prompt)]
        entries = mtp_entries(packed_rows([documents], 0, with_before=True), 3)
        for depth, entry in enumerate(entries, start=1):
            assert len(entry.rows.target_ids_M) == mtp_targets(documents, depth)


def test_who_sees_whom_stays_but_for_slots_without_an_entry():
    generator = torch.Generator().manual_seed(5)
    for _ in range(5):
        rows = random_rows(generator, 2, 6, with_before=True)
        for entry in mtp_entries(rows, 2):
            alone_NT = ~entry.has_entry_NT & (rows.segment_ids_NT != -1)
            before, after = rows.dense_mask()[:, 0], entry.rows.dense_mask()[:, 0]
            itself_TT = torch.eye(before.shape[1], dtype=torch.bool)
            touched = alone_NT.unsqueeze(1) | alone_NT.unsqueeze(2)
            assert torch.equal(after, torch.where(touched, itself_TT, before))
            held = rows.copies_NT()
            assert torch.equal(entry.rows.copies_NT()[~alone_NT], held[~alone_NT])


def test_rows_of_one_document_get_a_mask():
    one, other = join(torch.tensor([5]), torch.tensor([6, 7])), join(torch.tensor([8]), torch.tensor([9]))
    assert padded_rows([one, other], 0).segments is None
    (entry,) = mtp_entries(packed_rows([[plain(one)], [plain(other)]], 0, with_before=True), 1)
    assert entry.rows.target_ids_M.tolist() == [7]  # 6 and 9 are predicted by a first token
    assert entry.rows.dense_mask()[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_the_depths_of_multi_token_prediction_count_every_owner():
    sequences = forked_sequences(5)
    document = trie_document(sequences, 1)
    entries = mtp_entries(packed_rows([[document]], 0, with_before=True), 3)
    for depth, entry in enumerate(entries, start=1):
        assert entry.rows.segments.repeats is None
        expected = mtp_targets([plain(each) for each in sequences], depth)
        assert entry.rows.target_ids_M.numel() == mtp_targets([document], depth) == expected > 0


@st.composite
def sequences(draw) -> tuple[list[torch.Tensor], list[int], list[int]]:
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=4))
    prompts = [draw(st.integers(0, 6)) for _ in masks]
    dtype = draw(st.sampled_from([torch.int64, torch.float32, torch.bool]))
    totals = [prompt + len(mask) for prompt, mask in zip(prompts, masks, strict=True)]
    return [torch.tensor(mask).to(dtype) for mask in masks], totals, [len(mask) for mask in masks]


@settings(max_examples=60, deadline=None)
@given(sequences(), st.integers(0, 5))
def test_a_token_counts_where_its_response_says(given_sequences, spare):
    masks, totals, responses = given_sequences
    row = whole_row_mask(masks, totals, responses, sum(totals) + spare)
    assert row.shape == (1, sum(totals) + spare) and row.dtype == masks[0].dtype
    expected = []
    for mask, total, response in zip(masks, totals, responses, strict=True):
        expected += [0] * (total - response) + [int(value) for value in mask]
    assert [int(value) for value in row[0]] == expected + [0] * spare


@settings(max_examples=40, deadline=None)
@given(sequences(), st.integers(2, 4))
def test_ranks_have_what_their_ids_have(given_sequences, ranks):
    """Ids sliced sequence by sequence meet their own mask; together the ranks have the whole of it."""
    masks, totals, responses = given_sequences
    whole = whole_row_mask(masks, totals, responses, sum(totals))[0]
    slices = []
    for rank in range(ranks):
        tokens = sum(2 * -(-total // (2 * ranks)) for total in totals)
        slices.append(whole_row_mask(masks, totals, responses, tokens, rank=rank, ranks=ranks)[0])
    start = 0
    for index, total in enumerate(totals):
        width = 2 * -(-total // (2 * ranks))
        before = sum(2 * -(-other // (2 * ranks)) for other in totals[:index])
        parts = [part[before : before + width] for part in slices]
        assert torch.equal(zigzag_unslice(parts, total), whole[start : start + total])
        assert torch.equal(parts[1], zigzag_slice(whole[start : start + total], 1, ranks, pad_value=0))
        start += total


ONES = torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ([ONES, ONES], [8], [3], 16),
            "the same number of response masks, total lengths and response lengths, got 2, 1 and 1",
        ),
        (([], [], [], 16), "a row needs at least one sequence, got none"),
        (([ONES, ONES.bool()], [8, 8], [3, 3], 16), "must have the same dtype, got torch.bool, torch.int64"),
        (([ONES, ONES], [8, 8], [3, 4], 16), "sequence 1: got a mask of 3 tokens for a response of 4 tokens in a"),
        (([ONES], [2], [3], 16), "sequence 0: got a mask of 3 tokens for a response of 3 tokens in a sequence of 2"),
        (([ONES, ONES], [8, 8], [3, 3], 15), "sequences of 16 tokens in total do not fit in a row of 15"),
    ],
    ids=["surplus", "none", "dtypes", "mask", "response", "row"],
)
def test_mistakes_of_masks(arguments, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        whole_row_mask(*arguments)


def test_every_rank_attends_to_equally_many_tokens():
    """What the order is for: token t attends to t + 1 tokens, and every rank has the same sum."""
    for ranks in (2, 3, 4):
        sums = {int((zigzag_slice(torch.arange(48), rank, ranks) + 1).sum()) for rank in range(ranks)}
        assert sums == {48 * 49 // 2 // ranks}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.sampled_from([torch.int64, torch.bool, torch.float32]), st.booleans())
def test_slices_come_back_as_the_row(length, ranks, dtype, in_rows):
    """For every length and number of ranks, for ids [T], masks and hidden states [N, T, H]."""
    shape = (2, length, 3) if in_rows else (length,)
    row = torch.randint(0, 2, shape).to(dtype)
    dim = 1 if in_rows else 0
    slices = [zigzag_slice(row, rank, ranks, pad_value=0, dim=dim) for rank in range(ranks)]
    tokens = length if ranks == 1 else 2 * -(-length // (2 * ranks))
    assert {part.shape[dim] for part in slices} == {tokens} and {part.dtype for part in slices} == {dtype}
    assert torch.equal(zigzag_unslice(slices, length, dim), row)
    padded = zigzag_unslice(slices, dim=dim)
    assert not padded.narrow(dim, length, padded.shape[dim] - length).any()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: zigzag_slice(torch.arange(10), 0, 2),
            "10 tokens .* 4 chunks for 2 ranks; pad them to 12, or pass a pad",
        ),
        (lambda: zigzag_slice(torch.arange(8), 2, 2), "expected a rank from 0 to 1, got 2"),
        (lambda: zigzag_slice(torch.arange(8), -1, 2), "expected a rank from 0 to 1, got -1"),
        (lambda: zigzag_unslice([torch.arange(4), torch.arange(6)]), r"one slice per rank, .*, got lengths \[4, 6\]"),
        (lambda: zigzag_unslice([torch.arange(3), torch.arange(3)]), r"of the same even length, got lengths \[3, 3\]"),
        (lambda: zigzag_unslice([]), r"one slice per rank, .* got lengths \[\]"),
        (
            lambda: zigzag_unslice([torch.arange(4)] * 2, length=9),
            "the slices hold 8 tokens in total, too few for a row of 9",
        ),
    ],
    ids=["divides", "rank above", "rank below", "unequal", "odd", "none", "too short"],
)
def test_mistakes_of_slices(call, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        call()


@pytest.mark.parametrize(("module", "examples"), [(masks, 5), (context_slices, 4), (rolled, 1)])
def test_the_worked_examples(module, examples):
    found = doctest.testmod(module)
    assert found.failed == 0 and found.attempted >= examples
