"""Ranked responses as the micro-batches of one rank, with the margins between them.

B sequences (responses), Q pairs of responses to the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from training.utils.data.documents import responses_document
from training.utils.data.phases import ResponsesRow
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.ranked import RankedRows, planned_tokens, ranked_rows, real_tokens
from training.utils.run.errors import ThreestepError


@dataclass(frozen=True)
class RankedBatch:
    """margin_Q: float32, by how much the data asks the better response to beat the worse; 0 where it says nothing."""

    ranked: RankedRows
    margin_Q: torch.Tensor


def ranked_batches(
    rows: Sequence[ResponsesRow], plan: PlanSettings, rank: int, pad_token_id: int, device: torch.device
) -> list[RankedBatch]:
    """Lay out this rank's share of `rows`; the same number of micro-batches on every rank."""
    documents = [responses_document(row, are_targets=False) for row in rows]
    batches = []
    for layout in planned_rows(rows, plan, rank):
        chosen = [[documents[index] for index in row] for row in layout]
        ranked = ranked_rows(chosen, plan.packed, pad_token_id)
        levels = [np.zeros(0, np.float32), *(margin_levels(rows[index]) for row in layout for index in row)]
        level_B = torch.from_numpy(np.concatenate(levels))
        margin_Q = level_B[ranked.better_Q] - level_B[ranked.worse_Q]
        batches.append(RankedBatch(ranked.to(device), margin_Q.to(device)))
    return batches


def planned_rows(rows: Sequence[ResponsesRow], plan: PlanSettings, rank: int) -> Sequence[Sequence[Sequence[int]]]:
    """This rank's micro-batches of rows of indices into `rows`."""
    lengths = [planned_tokens(len(row.prompt_ids), _lengths(row), plan.packed) for row in rows]
    return plan_step(lengths, plan).micro_batches[rank]


def computed_tokens(row: ResponsesRow, plan: PlanSettings) -> int:
    """Tokens that a forward of this row computes, padding left out."""
    return real_tokens(len(row.prompt_ids), _lengths(row), plan.packed)


def margin_levels(row: ResponsesRow) -> np.ndarray:
    """float32 [K]: for each response the sum of the margins below it in the ranking.

    The margin of a pair is the difference of its levels. Worked example, margins (0.5, 2): levels (2.5, 2, 0), so the
    first is to beat the second by 0.5, the second the third by 2, and the first the third by 2.5.
    """
    if row.margins is None:
        return np.zeros(len(row.response_ids), np.float32)
    return np.append(np.cumsum(row.margins[::-1])[::-1], 0).astype(np.float32)


def check_margins(rows: Sequence[ResponsesRow], margin_scale: float) -> None:
    """ThreestepError where margins are to be trained with and no row has any."""
    if margin_scale > 0 and all(row.margins is None for row in rows):
        raise ThreestepError(
            f"--margin_scale {margin_scale:g} needs margins and no training row has one: name their column with "
            "--margin_column, or give the dataset class a get_margin"
        )


def _lengths(row: ResponsesRow) -> list[int]:
    return [len(ids) for ids in row.response_ids]
