"""Rows of every layout give the same sequences."""

from __future__ import annotations

import pytest
import torch

from threestep.plugins.audit.recording.sequences import sequences_of
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, plain, shared_prompt
from training.utils.layout.rows import packed_rows, padded_rows
from training.utils.layout.trie import trie_document

pytestmark = pytest.mark.unit


def sequence(ids: list[int], targets: list[int]) -> TokenSequence:
    return TokenSequence(torch.tensor(ids), torch.tensor([place in targets for place in range(len(ids))]))


def run(ids: list[int], is_target: bool) -> TokenSequence:
    return TokenSequence(torch.tensor(ids), torch.full((len(ids),), is_target))


FIRST, SECOND = sequence([5, 6, 7], [2]), sequence([8, 9], [1])


@pytest.mark.parametrize("rows", [padded_rows([FIRST, SECOND], 0), packed_rows([[plain(FIRST), plain(SECOND)]], 0)])
def test_the_worked_example(rows):
    found = sequences_of(rows)
    assert found.lengths_S.tolist() == [3, 2] and found.token_ids_T.tolist() == [5, 6, 7, 8, 9]
    assert found.place_M.tolist() == [2, 4]
    assert found.spread(torch.tensor([1.5, -2.5])).tolist() == [0, 0, 1.5, 0, -2.5]


def test_a_shared_prompt_stands_in_each():
    document = shared_prompt(run([5, 6], False), [run([7, 8], True), run([9], True)])
    found = sequences_of(packed_rows([[plain(SECOND), document]], 0))
    assert found.lengths_S.tolist() == [2, 4, 3]
    assert found.token_ids_T.tolist() == [8, 9, 5, 6, 7, 8, 5, 6, 9]
    assert found.place_M.tolist() == [1, 4, 5, 8]


def test_equal_beginnings_stand_in_each():
    both = [sequence([5, 6, 7, 8], [2, 3]), sequence([5, 6, 7, 9], [2, 3])]
    found = sequences_of(packed_rows([[trie_document(both, 1)]], 0))
    assert found.token_ids_T.tolist() == [5, 6, 7, 8, 5, 6, 7, 9] and found.place_M.tolist() == [2, 3, 6, 7]


def test_a_rank_without_rows_has_nothing():
    found = sequences_of(padded_rows([], 0))
    assert found.lengths_S.tolist() == [] and found.token_ids_T.tolist() == []


def test_parts_that_are_no_run_are_refused():
    from training.utils.contracts.documents import Document, Segment

    trunk, path = Segment(run([5], False)), Segment(run([6, 7], True), sees=(0,), first_position=1, predecessor=0)
    other = Segment(run([8, 9], True), sees=(0,), first_position=1, predecessor=0)
    end = Segment(run([4], False), sees=(0, 1, 2), first_position=3)
    document = Document((trunk, path, other, end), ends=(3,), owners=((0,), (0,), (0,), (0,)))
    with pytest.raises(ThreestepError, match="one run of tokens, got parallel paths or a conversation with forks"):
        sequences_of(packed_rows([[document]], 0))
