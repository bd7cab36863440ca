"""Micro-batches of ranked responses know the margin of each pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.step2_reward.batches import check_margins, computed_tokens, margin_levels, ranked_batches
from training.utils.data.phases import ResponsesRow
from training.utils.layout.planner import PlanSettings
from training.utils.run.errors import ThreestepError

CPU = torch.device("cpu")


def row(row_id: int, responses: int, margins: list[float] | None = None) -> ResponsesRow:
    """`row_id` + 1 prompt tokens; responses of 1, 2, ... tokens; every response has an id of its own."""
    ids = tuple(np.full(length + 1, 10 * row_id + length, np.int32) for length in range(responses))
    given = None if margins is None else np.array(margins, np.float32)
    return ResponsesRow(row_id, np.full(row_id + 1, 5, np.int32), ids, given)


def test_a_pairs_margin_is_the_sum_of_those_between():
    assert margin_levels(row(0, 3, [0.5, 2.0])).tolist() == [2.5, 2.0, 0.0]  # the docstring's example
    assert margin_levels(row(0, 2, [0.75])).tolist() == [0.75, 0.0]
    assert margin_levels(row(0, 3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("micro", [1, 3])
def test_margins_stay_with_their_pairs(packed, micro):
    """The responses' own ids tell which pair a margin stands at, however rows are laid out."""
    rows = [row(0, 2, [0.25]), row(1, 3, [1.0, 4.0]), row(2, 2)]
    expected = {(0, 1): 0.25, (10, 11): 1.0, (10, 12): 5.0, (11, 12): 4.0, (20, 21): 0.0}
    plan = PlanSettings(1, max_rows_per_micro_batch=micro, packed=packed, max_row_tokens=12)
    found = {}
    for batch in ranked_batches(rows, plan, 0, 0, CPU):
        last_ids_B = batch.ranked.rows.input_ids_NT.flatten()[batch.ranked.rows.end_B]
        for better, worse, margin in zip(
            batch.ranked.better_Q, batch.ranked.worse_Q, batch.margin_Q.tolist(), strict=True
        ):
            found[int(last_ids_B[better]), int(last_ids_B[worse])] = margin
    assert found == expected


def test_a_rank_without_rows_has_a_batch_without_pairs():
    batches = ranked_batches([row(0, 2, [1.0])], PlanSettings(2), 1, 0, CPU)
    assert [batch.margin_Q.tolist() for batch in batches] == [[]]


def test_tokens_are_counted_as_they_are_computed():
    assert computed_tokens(row(3, 2), PlanSettings(1, packed=True)) == 4 + 1 + 2
    assert computed_tokens(row(3, 2), PlanSettings(1)) == 2 * 4 + 1 + 2


def test_margins_that_are_asked_for_must_be_there():
    check_margins([row(0, 2)], 0.0)
    check_margins([row(0, 2), row(1, 2, [0.0])], 0.5)
    with pytest.raises(ThreestepError, match="--margin_scale 0.5 needs margins and no training row.*--margin_col"):
        check_margins([row(0, 2), row(1, 3)], 0.5)
