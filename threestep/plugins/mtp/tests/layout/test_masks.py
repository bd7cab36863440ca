"""Response masks widened to the packed row: the worked examples, and the same mask token by token."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from threestep.plugins.mtp.layout import masks as mtp_masks
from threestep.plugins.mtp.layout.context_slices import zigzag_slice, zigzag_unslice
from threestep.plugins.mtp.layout.masks import whole_row_mask
from training.utils.base.errors import ThreestepError


def test_the_worked_examples():
    found = doctest.testmod(mtp_masks)
    assert found.failed == 0 and found.attempted == 5


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
        (([ONES, ONES], [8], [3], 16), "as many response masks as total and response lengths, got 2, 1 and 1"),
        (([], [], [], 16), "a row needs at least one sequence, got none"),
        (([ONES, ONES.bool()], [8, 8], [3, 3], 16), "need one dtype, got torch.bool, torch.int64"),
        (([ONES, ONES], [8, 8], [3, 4], 16), "sequence 1: a mask of 3 tokens for a response of 4 tokens in a"),
        (([ONES], [2], [3], 16), "sequence 0: a mask of 3 tokens for a response of 3 tokens in a sequence of 2"),
        (([ONES, ONES], [8, 8], [3, 3], 15), "sequences of 16 tokens in total do not fit into a row of 15"),
    ],
    ids=["surplus", "none", "dtypes", "mask", "response", "row"],
)
def test_mistakes(arguments, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        whole_row_mask(*arguments)
