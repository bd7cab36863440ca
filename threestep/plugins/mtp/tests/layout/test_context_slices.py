"""Zigzag slices: the worked examples, the balance they are for, and back again."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from threestep.plugins.mtp.layout import context_slices
from threestep.plugins.mtp.layout.context_slices import zigzag_slice, zigzag_unslice
from training.utils.base.errors import ThreestepError


def test_the_worked_examples():
    found = doctest.testmod(context_slices)
    assert found.failed == 0 and found.attempted == 4


def test_three_ranks_by_hand():
    """Twelve tokens in six chunks 0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11: rank r has chunks r and 5 - r."""
    slices = [zigzag_slice(torch.arange(12), rank, 3).tolist() for rank in range(3)]
    assert slices == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


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
            r"10 tokens do not divide into the 4 chunks of 2 ranks; pad them to 12 or give a pad_value",
        ),
        (lambda: zigzag_slice(torch.arange(8), 2, 2), "expected a rank from 0 to 1, got 2"),
        (lambda: zigzag_slice(torch.arange(8), -1, 2), "expected a rank from 0 to 1, got -1"),
        (
            lambda: zigzag_unslice([torch.arange(4), torch.arange(6)]),
            r"expected one slice per rank, all of one even length, got lengths \[4, 6\]",
        ),
        (lambda: zigzag_unslice([torch.arange(3), torch.arange(3)]), r"of one even length, got lengths \[3, 3\]"),
        (lambda: zigzag_unslice([]), r"one slice per rank, .* got lengths \[\]"),
        (
            lambda: zigzag_unslice([torch.arange(4), torch.arange(4)], length=9),
            "slices of 8 tokens in total cannot hold a row of 9",
        ),
    ],
    ids=["divides", "rank above", "rank below", "unequal", "odd", "none", "too short"],
)
def test_mistakes(call, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        call()
