"""Ranked responses as sequences and pairs."""

from __future__ import annotations

import pytest
import torch

from training.utils.contracts.documents import Document, TokenSequence, shared_prompt, unshared
from training.utils.layout.rows import RankedRows, beyond_shortest, planned_size, ranked_rows
from training.utils.models.flops import visible_pairs


def sequence(ids: list[int]) -> TokenSequence:
    return TokenSequence(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.bool))


def row(prompt: list[int], *responses: list[int]) -> Document:
    return shared_prompt(sequence(prompt), [sequence(ids) for ids in responses])


PAIR = row([5, 6], [7, 2], [8, 9, 2])
THREE = row([4], [1], [2], [3])


def assert_pairs(batch: RankedRows) -> None:
    """1 beats 2; of the three, the first beats two and the second one."""
    assert list(zip(batch.better_Q.tolist(), batch.worse_Q.tolist(), strict=True)) == [(0, 1), (2, 3), (2, 4), (3, 4)]
    torch.testing.assert_close(batch.weight_Q, torch.tensor([1.0, 1 / 3, 1 / 3, 1 / 3]))


APART = [[5, 6, 7, 2, 0], [5, 6, 8, 9, 2], [4, 1, 0, 0, 0], [4, 2, 0, 0, 0], [4, 3, 0, 0, 0]]


@pytest.mark.parametrize(
    ("packing", "shared", "ids", "ends"),
    [
        ([[PAIR], [THREE]], False, APART, [3, 9, 11, 16, 21]),
        ([[PAIR, THREE]], False, APART, [3, 9, 11, 16, 21]),
        ([[PAIR, THREE]], True, [[5, 6, 7, 2, 8, 9, 2, 4, 1, 2, 3]], [3, 6, 8, 9, 10]),
        ([[PAIR], [THREE]], True, [[5, 6, 7, 2, 8, 9, 2], [4, 1, 2, 3, 0, 0, 0]], [3, 6, 8, 9, 10]),
    ],
)
def test_a_pair_and_three_ranked_responses(packing, shared, ids, ends):
    batch = ranked_rows(packing, shared, pad_token_id=0)
    assert batch.rows.input_ids_NT.tolist() == ids and batch.rows.end_B.tolist() == ends
    assert batch.rows.target_ids_M.numel() == 0
    assert_pairs(batch)
    after = ranked_rows([[THREE, PAIR]], shared, 0)
    assert list(zip(after.better_Q.tolist(), after.worse_Q.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 2), (3, 4)]
    none = ranked_rows([], shared, 0)
    assert none.rows.input_ids_NT.shape == (1, 1)
    assert none.better_Q.shape == none.worse_Q.shape == none.weight_Q.shape == (0,)


@pytest.mark.parametrize("shared", [False, True])
def test_tokens_beyond_the_shortest_response(shared):
    """Of responses that are predicted: two and three tokens, then three, one and two."""

    def predicted(prompt: list[int], *responses: list[int]) -> Document:
        parts = [TokenSequence(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool)) for ids in responses]
        return shared_prompt(sequence(prompt), parts)

    batch = ranked_rows(
        [[predicted([5, 6], [7, 2], [8, 9, 2]), predicted([4], [1, 2, 3], [2], [3, 9])]], shared, pad_token_id=0
    )
    beyond_M, sequence_M = beyond_shortest(batch), batch.rows.sequence_M
    of_sequences = [beyond_M[sequence_M == number].tolist() for number in range(5)]
    assert of_sequences == [[False, False], [False, False, True], [False, True, True], [False], [False, True]]
    none = beyond_shortest(ranked_rows([], shared, 0))
    assert none.dtype == torch.bool and none.numel() == 0


@pytest.mark.parametrize(
    "responses", [([1] * 5, [2] * 90), ([1] * 90, [2] * 5), ([1], [2], [3] * 40)], ids=["long", "short", "three"]
)
def test_the_planner_bounds_what_is_computed_padding_included(responses):
    one, lengths = row([5] * 10, *responses), [len(ids) for ids in responses]
    for shared in (False, True):
        rows = ranked_rows([[one]], shared, 0).rows
        assert planned_size(10, lengths, shared).tokens == rows.input_ids_NT.numel()
        assert not shared or planned_size(10, lengths, True).pairs == visible_pairs(one)
        alone = [one] if shared else unshared(one)
        assert sum(document.tokens for document in alone) == int((rows.segment_ids_NT >= 0).sum())
