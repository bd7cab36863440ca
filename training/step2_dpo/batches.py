"""Rows of ranked responses as micro-batches that remember which row and response each sequence is.

Knows no model and no loss. B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from training.utils.data.documents import responses_document
from training.utils.data.phases import ResponsesRow
from training.utils.engine.startup import Ranks
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.ranked import RankedRows, planned_tokens, ranked_rows

# Rows laid out at a time where a whole split is read: so many forwards of each rank, enough to balance and to sort.
_FORWARDS_AT_A_TIME = 16


@dataclass(frozen=True)
class PairBatch:
    """ranked: the responses as sequences, and who should beat whom. row_B: int64, the row (index into the split) of
    each sequence. place_B: int64, its place among that row's responses, 0 the best."""

    ranked: RankedRows
    row_B: np.ndarray
    place_B: np.ndarray


def pair_batches(
    rows: Sequence[ResponsesRow], indices: Sequence[int], plan: PlanSettings, ranks: Ranks, pad_token_id: int
) -> list[PairBatch]:
    """This rank's share of the rows `indices`, laid out; the same number of micro-batches on every rank."""
    taken = [rows[index] for index in indices]
    lengths = [planned_tokens(len(row.prompt_ids), response_tokens(row), plan.packed) for row in taken]
    documents = [responses_document(row, are_targets=True) for row in taken]
    found = []
    for laid in plan_step(lengths, plan).micro_batches[ranks.rank]:
        ranked = ranked_rows([[documents[number] for number in row] for row in laid], plan.packed, pad_token_id)
        sequences = [
            (indices[number], place)
            for row in laid
            for number in row
            for place in range(len(taken[number].response_ids))
        ]
        row_B, place_B = np.array(sequences, dtype=np.int64).reshape(-1, 2).T
        found.append(PairBatch(ranked.to(ranks.device), row_B, place_B))
    return found


def all_pair_batches(
    rows: Sequence[ResponsesRow], indices: Sequence[int], plan: PlanSettings, ranks: Ranks, pad_token_id: int
) -> Iterator[PairBatch]:
    """The same for any number of rows, laid out some at a time. Whoever reads the same rows by the same plan is given
    the same micro-batches, and so the same numbers to the bit."""
    at_a_time = _FORWARDS_AT_A_TIME * plan.ranks * (plan.max_rows_per_micro_batch or 1)
    for start in range(0, len(indices), at_a_time):
        yield from pair_batches(rows, indices[start : start + at_a_time], plan, ranks, pad_token_id)


def response_tokens(row: ResponsesRow) -> list[int]:
    """Tokens of each response."""
    return [len(ids) for ids in row.response_ids]
