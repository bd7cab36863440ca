"""Scores of responses, computed by all ranks together and known to each of them.

Knows no loss and no flags; `read` runs the model, wherever and however it is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from training.utils.base.errors import ThreestepError
from training.utils.base.transfer import moved
from training.utils.engine.ranks.collectives import gathered
from training.utils.preference.batches import preference_batches
from training.utils.preference.evaluation import ScoredResponses

if TYPE_CHECKING:
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rows import ResponsesRow
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.layout.planner import PlanSettings

_PLANNED_ROWS = 1024  # laid out at a time, so that memory does not grow with the dataset


def score_responses(
    read: Callable[[TokenRows], torch.Tensor],
    rows: Sequence[ResponsesRow],
    plan: PlanSettings,
    pad_token_id: int,
    *,
    ranks: Ranks,
    media: RunMedia | None = None,
) -> ScoredResponses:
    """Score every response of `rows`. A collective: all ranks call it with the same rows and get the same result.

    read: TokenRows -> float32 [sequences], in eval mode. media: of the rows, if they have some.
    Raises ThreestepError where a score is not finite.
    """
    mine, everywhere = [], range(len(rows))
    for batch in preference_batches(
        rows,
        everywhere,
        plan,
        ranks,
        pad_token_id=pad_token_id,
        are_targets=False,
        rows_at_a_time=_PLANNED_ROWS,
        media=media,
    ):
        with torch.no_grad():
            scores_B = read(moved(batch.ranked.rows, ranks.device))
        batch_scores = scores_B.double().cpu().numpy()[: len(batch.row_B)]
        mine.append(np.column_stack([batch.row_B, batch.place_B, batch.tokens_B, batch_scores]))
    scored = gathered_scores(mine if ranks.leads else [])
    scores = scored.score_R
    not_finite = int(np.count_nonzero(~np.isfinite(scores)))
    if not_finite:
        raise ThreestepError(
            f"{not_finite:,} of {len(scores):,} scores are not finite: the model has diverged; train it with a lower "
            "--learning_rate, or in another --dtype"
        )
    return scored


def gathered_scores(mine: Sequence[np.ndarray]) -> ScoredResponses:
    """Put all ranks' scores in order. A collective. mine: of micro-batches, float64 [responses, 4]: the row, the place
    among its responses, tokens, score."""
    prompts, places, tokens, scores = np.concatenate(gathered(np.concatenate([np.zeros((0, 4)), *mine]))).T
    order = np.lexsort((places, prompts))
    return ScoredResponses(prompts[order].astype(np.int64), scores[order], tokens[order].astype(np.int64))


def chosen_alone(rows: Sequence[ResponsesRow]) -> list[ResponsesRow]:
    """The same rows with their best response only."""
    return [replace(row, response_ids=row.response_ids[:1], margins=None) for row in rows]
