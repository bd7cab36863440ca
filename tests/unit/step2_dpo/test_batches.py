"""Micro-batches that remember which row and response each sequence is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.step2_dpo.batches import all_pair_batches, pair_batches
from training.utils.data.phases import ResponsesRow
from training.utils.engine.startup import Ranks
from training.utils.layout.planner import PlanSettings


def made(lengths: list[list[int]]) -> list[ResponsesRow]:
    """Row i has the prompt (i), and responses of these lengths whose tokens are 100 i + place."""
    return [
        ResponsesRow(
            i, np.array([i], np.int32), tuple(np.full(n, 100 * i + k, np.int32) for k, n in enumerate(responses))
        )
        for i, responses in enumerate(lengths)
    ]


ROWS = made([[3, 1], [2, 2, 4], [1, 5], [2, 1], [6, 1]])


def plan(packed: bool, ranks: int = 1) -> PlanSettings:
    return PlanSettings(
        ranks=ranks, max_tokens_per_micro_batch=16, max_rows_per_micro_batch=2, packed=packed, max_row_tokens=16
    )


def ranks(world_size: int = 1, rank: int = 0) -> Ranks:
    return Ranks(rank, rank, world_size, torch.device("cpu"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("taken", [[4, 1, 0], [2, 2, 3, 1], [0, 1, 2, 3, 4]])
def test_each_sequence_is_the_response_it_says(packed, taken):
    seen = []
    for batch in pair_batches(ROWS, taken, plan(packed), ranks(), pad_token_id=9):
        rows = batch.ranked.rows
        assert len(batch.row_B) == len(batch.place_B) == rows.end_B.numel()
        for sequence, (row, place) in enumerate(zip(batch.row_B, batch.place_B, strict=True)):
            of_it = rows.target_ids_M[rows.sequence_M == sequence]
            assert of_it.tolist() == ROWS[row].response_ids[place].tolist()
            seen.append((int(row), int(place)))
        # best first: a pair's better sequence has the lower place of the same row
        better, worse = batch.ranked.better_Q.numpy(), batch.ranked.worse_Q.numpy()
        assert (batch.row_B[better] == batch.row_B[worse]).all()
        assert (batch.place_B[better] < batch.place_B[worse]).all()
    assert sorted(seen) == sorted((row, place) for row in taken for place in range(len(ROWS[row].response_ids)))


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_with_nothing_to_do_has_an_empty_batch(packed):
    mine, none = (pair_batches(ROWS, [3], plan(packed, 2), ranks(2, rank), pad_token_id=9) for rank in (0, 1))
    assert len(mine) == len(none) == 1
    assert none[0].row_B.shape == none[0].place_B.shape == (0,) and none[0].ranked.better_Q.numel() == 0
    assert none[0].ranked.rows.input_ids_NT.tolist() == [[9]]


def test_any_number_of_rows_some_at_a_time():
    rows = made([[1, 2]] * 70)
    batches = list(all_pair_batches(rows, range(70), plan(False), ranks(), pad_token_id=9))
    assert sorted(np.concatenate([batch.row_B for batch in batches]).tolist()) == sorted([*range(70), *range(70)])
    assert max(batch.row_B.max() for batch in batches[:16]) == 31  # 16 forwards of 2 rows are laid out first
    assert list(all_pair_batches(rows, [], plan(False), ranks(), pad_token_id=9)) == []
