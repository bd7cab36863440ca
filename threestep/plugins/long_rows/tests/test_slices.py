"""Slices of rows by hand: which tokens, which targets, what a model gets."""

from __future__ import annotations

import pytest
import torch

from threestep.plugins.long_rows.exchange import shareable
from threestep.plugins.long_rows.group import SequenceGroup
from threestep.plugins.long_rows.slices import RowSlice, sliced_inputs
from training.utils.base.errors import ThreestepError
from training.utils.models.row_sharing import ALONE, ROW_PART


def test_seven_tokens_on_three_ranks():
    """Slices of three; the last one is filled with 0."""
    row_NT = torch.arange(1, 8).view(1, 7)
    slices = [RowSlice(SequenceGroup(3, place), 7).cut(row_NT).tolist() for place in range(3)]
    assert slices == [[[1, 2, 3]], [[4, 5, 6]], [[7, 0, 0]]]


def test_embeddings_are_cut_along_the_row():
    row_NTE = torch.arange(2 * 3 * 2).view(2, 3, 2)
    assert RowSlice(SequenceGroup(2, 1), 3).cut(row_NTE).tolist() == [[[4, 5], [0, 0]], [[10, 11], [0, 0]]]


def test_slots_of_all_rows_are_cut_row_by_row():
    """Two rows of three on two ranks; and one of seven, its last block filled up to eight."""
    slots_L = torch.tensor([1, 2, 3, 4, 5, 6])
    slices = [RowSlice(SequenceGroup(2, place), 3).cut_slots(slots_L, -1).tolist() for place in range(2)]
    assert slices == [[1, 2, 4, 5], [3, -1, 6, -1]]
    assert RowSlice(SequenceGroup(2, 1), 8).cut_slots(torch.arange(7), -1).tolist() == [4, 5, 6, -1]


def test_every_position_belongs_to_one_rank():
    """Two rows of seven on three ranks: flat position 7 is the second row's first token, in slices of three."""
    positions_M = torch.tensor([0, 2, 3, 6, 7, 12, 13])
    owned = [RowSlice(SequenceGroup(3, place), 7).owned(positions_M) for place in range(3)]
    assert [each.which_m.tolist() for each in owned] == [[0, 1, 4], [2, 5], [3, 6]]
    assert [each.local_m.tolist() for each in owned] == [[0, 2, 3], [0, 5], [0, 3]]
    assert {each.count for each in owned} == {7}


def test_a_model_gets_a_slice_and_attention_the_row():
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    inputs = {
        "input_ids": torch.arange(5).view(1, 5),
        "position_ids": torch.arange(10, 15).view(1, 5),
        "attention_mask": mask,
        "runs": ("a run",),
    }
    given, part = sliced_inputs(inputs, SequenceGroup(2, 1))
    assert given["input_ids"].tolist() == [[3, 4, 0]] and given["position_ids"].tolist() == [[13, 14, 0]]
    assert given["attention_mask"].shape == (1, 1, 3, 3) and given["runs"] == ("a run",)
    assert given[ROW_PART] is part and part.mask is mask and part.width == 5


@pytest.mark.parametrize("heads, size, copies", [(4, 2, 1), (1, 2, 2), (3, 2, 2), (2, 8, 4), (6, 4, 2)])
def test_key_heads_are_repeated_until_they_can_be_shared_out(heads: int, size: int, copies: int):
    key_NKtD = torch.randn(1, heads, 3, 2)
    repeated = shareable(key_NKtD, SequenceGroup(size, 0))
    assert torch.equal(repeated, key_NKtD.repeat_interleave(copies, dim=1))


def test_groups_that_do_not_share_out_the_ranks():
    with pytest.raises(ThreestepError, match=r"expects a divisor of the 6 ranks \(1, 2, 3, 6\), got 4"):
        SequenceGroup(4).joined(0, 6)
    assert SequenceGroup(1).joined(3, 4) is ALONE
