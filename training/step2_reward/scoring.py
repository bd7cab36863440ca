"""Scores of responses, computed by all ranks together and known to each of them.

Knows no loss and no flags; `read` runs the model, wherever and however it is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from training.step2_reward.batches import planned_rows
from training.step2_reward.evaluation import ScoredResponses
from training.utils.data.documents import responses_document
from training.utils.data.phases import ResponsesRow
from training.utils.engine.collectives import gathered
from training.utils.engine.startup import Ranks
from training.utils.layout.planner import PlanSettings
from training.utils.layout.ranked import response_rows
from training.utils.layout.rows import TokenRows
from training.utils.run.errors import ThreestepError

_PLANNED_ROWS = 1024  # laid out at a time, so that memory does not grow with the dataset


def score_responses(
    read: Callable[[TokenRows], torch.Tensor],
    rows: Sequence[ResponsesRow],
    plan: PlanSettings,
    pad_token_id: int,
    ranks: Ranks,
) -> ScoredResponses:
    """Score every response of `rows`. A collective: all ranks call it with the same rows and get the same result.

    read: TokenRows -> float32 [sequences], in eval mode. Raises ThreestepError where a score is no finite number.
    """
    mine = [np.zeros((0, 4))]
    for start in range(0, len(rows), _PLANNED_ROWS):
        part = rows[start : start + _PLANNED_ROWS]
        for layout in planned_rows(part, plan, ranks.rank):
            documents = [[responses_document(part[index], are_targets=False) for index in row] for row in layout]
            with torch.no_grad():
                scores_B = read(response_rows(documents, plan.packed, pad_token_id).to(ranks.device))
            responses = [
                (start + index, place, len(ids))
                for row in layout
                for index in row
                for place, ids in enumerate(part[index].response_ids)
            ]
            found = scores_B.double().cpu().numpy()[: len(responses)]
            mine.append(np.column_stack([np.array(responses).reshape(-1, 3), found]))
    everyone = np.concatenate(gathered(np.concatenate(mine)))
    prompts, places, tokens, scores = everyone.T
    strange = int(np.count_nonzero(~np.isfinite(scores)))
    if strange:
        raise ThreestepError(
            f"{strange:,} of {len(scores):,} scores are no finite numbers: the model has diverged; train it with a "
            "lower --learning_rate, or in another --dtype"
        )
    order = np.lexsort((places, prompts))
    return ScoredResponses(prompts[order].astype(np.int64), scores[order], tokens[order].astype(np.int64))


def without_end(row: ResponsesRow, end_token_id: int) -> ResponsesRow:
    """The same row, its responses without the end of the conversation. One that was cut has none and stays whole, one
    that is nothing else keeps it."""
    ends = [len(ids) > 1 and ids[-1] == end_token_id for ids in row.response_ids]
    return replace(
        row, response_ids=tuple(ids[:-1] if end else ids for ids, end in zip(row.response_ids, ends, strict=True))
    )


def chosen_alone(rows: Sequence[ResponsesRow]) -> list[ResponsesRow]:
    """The same rows with their best response only."""
    return [replace(row, response_ids=row.response_ids[:1], margins=None) for row in rows]
