"""Negative log-likelihoods of given texts in the token layout, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from threestep.plugins.evaluation.model import ChatModel, check_room
from threestep.plugins.evaluation.sharing import ALONE, Sharers
from training.utils.base.console import log
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.planner import plan_step
from training.utils.layout.rows import laid_out
from training.utils.models.attention import plan_for
from training.utils.models.layout_check import check_padded, check_segments, notes_on, why_not_packed
from training.utils.models.token_model import PolicyModel

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.contracts.token_rows import TokenRows

_PLANNED_ROWS = 256  # planned together, so that rows of similar length share a forward


@torch.no_grad()
def row_losses(
    model: ChatModel,
    documents: Sequence[Document],
    longest_tokens: int,
    rows_per_batch: int,
    *,
    flag: str,
    sharers: Sharers = ALONE,
) -> tuple[list[float], list[int], float]:
    """Return each document's loss (nats, summed over its target tokens) and number of targets, and the share of all
    targets that are the model's first choice. ThreestepError if `flag` allows more than the model's positions.

    sharers: processes that take documents in turns, as many at a time as are planned together; ranks other than the
        first get none.
    """
    check_room(model, longest_tokens, flag)
    read, ranks = PolicyModel(model.model), Ranks(0, 0, 1, model.model.device)

    def logprobs_M(rows: TokenRows) -> torch.Tensor:
        return read(rows).logprobs_M

    check_padded(model.model, logprobs_M, ranks.device)
    needed = model.data.needs_segments
    reason = why_not_packed(model.model, logprobs_M, longest_tokens, ranks.device, sharing=needed is not None)
    check_segments(reason, needed, type(model.model).__name__)
    for note in notes_on(model.model):
        log(f"{model.name}: {note}")
    if reason is not None:
        log(f"warning: {model.name} uses padded rows: {reason}", sharers.is_main)
    plan = plan_for(model.model, rows_per_batch, longest_tokens, packed=reason is None, ranks=1)
    pad = model.tokenizer.pad_token_id

    def part_losses(piece: int) -> tuple[list[float], list[int], int]:
        part = documents[piece * _PLANNED_ROWS : (piece + 1) * _PLANNED_ROWS]
        losses, targets, right = [0.0] * len(part), [0] * len(part), 0
        for layout in plan_step([document.tokens for document in part], plan)[0]:
            rows = laid_out([[part[index] for index in row] for row in layout], pad, model.media)
            result = read(rows.to(ranks.device))
            right += int(result.is_greedy_M.sum())
            counts = [(index, part[index].targets) for row in layout for index in row]
            of_each = result.logprobs_M.double().split([count for _, count in counts])
            for (index, count), logprobs in zip(counts, of_each, strict=True):
                losses[index], targets[index] = -float(logprobs.sum()), count
        return losses, targets, right

    parts = sharers.results("losses", -(-len(documents) // _PLANNED_ROWS), part_losses)
    losses, targets = ([number for part in parts for number in part[place]] for place in (0, 1))
    return losses, targets, sum(part[2] for part in parts) / max(1, sum(targets))
