"""Ranked responses to prompts, laid out for a pairwise loss: which should beat which, and their cost in tokens.

Q pairs of responses to the same prompt, B sequences, M target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from training.utils.contracts.documents import Document, unshared
from training.utils.layout.planner import DocumentSize, plain_size
from training.utils.layout.rows import laid_out

if TYPE_CHECKING:
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.token_rows import TokenRows


@dataclass(frozen=True)
class RankedRows:
    """A micro-batch of prompts with their responses as sequences, and which should beat which.

    better_Q, worse_Q: int64, indices of sequences (as in `rows.end_B` and `rows.sequence_M`).
    weight_Q: float32, each pair's share of its prompt; the pairs of one prompt add up to 1.
    """

    rows: TokenRows
    better_Q: torch.Tensor
    worse_Q: torch.Tensor
    weight_Q: torch.Tensor


def ranked_rows(
    rows: Sequence[Sequence[Document]],
    shared: bool,
    pad_token_id: int,
    responses: Sequence[int] | None = None,
    *,
    media: RunMedia | None = None,
    lacks: bool = False,
) -> RankedRows:
    """Lay out documents whose sequences are the responses to their prompts, best first, and list the pairs: i beats j
    for i < j of one prompt. shared: the prompt once for all its responses; otherwise each response has its own row.
    responses: how many each prompt has, where a document may have several prompts; None: each has one. media, lacks:
    see `laid_out`."""
    better: list[int] = []
    worse: list[int] = []
    weights: list[float] = []
    first = 0
    for count in [len(document.ends) for row in rows for document in row] if responses is None else responses:
        pairs = list(combinations(range(first, first + count), 2))
        better += [winner for winner, _ in pairs]
        worse += [loser for _, loser in pairs]
        weights += [1.0 / max(len(pairs), 1)] * len(pairs)
        first += count
    if not shared:
        rows = [[alone] for row in rows for document in row for alone in unshared(document)]
    return RankedRows(
        rows=laid_out(rows, pad_token_id, media, lacks),
        better_Q=torch.tensor(better, dtype=torch.int64),
        worse_Q=torch.tensor(worse, dtype=torch.int64),
        weight_Q=torch.tensor(weights, dtype=torch.float32),
    )


def planned_size(prompt_tokens: int, response_tokens: Sequence[int], shared: bool) -> DocumentSize:
    """Return the size of a prompt with its responses, for the planner: unless shared, one row per response, padded to
    the longest."""
    if not shared:
        row, rows = plain_size(prompt_tokens + max(response_tokens)), len(response_tokens)
        return DocumentSize(rows * row.tokens, rows * row.pairs)
    pairs = [prompt_tokens * tokens + plain_size(tokens).pairs for tokens in response_tokens]
    return DocumentSize(prompt_tokens + sum(response_tokens), plain_size(prompt_tokens).pairs + sum(pairs))


def beyond_shortest(ranked: RankedRows) -> torch.Tensor:
    """Return bool [M], True for tokens of a response beyond the length of its prompt's shortest response (the second
    part of LD-DPO's likelihood: Liu et al. 2024, length desensitization, who have two responses)."""
    sequence_M, sequences = ranked.rows.sequence_M, ranked.rows.end_B.numel()
    tokens_B = torch.bincount(sequence_M, minlength=sequences)
    shortest_B = tokens_B.clone()
    for here_Q, other_Q in ((ranked.better_Q, ranked.worse_Q), (ranked.worse_Q, ranked.better_Q)):
        shortest_B = shortest_B.scatter_reduce(0, here_Q, tokens_B.index_select(0, other_Q), "amin")
    by_sequence = torch.argsort(sequence_M, stable=True)
    starts_B = tokens_B.cumsum(0) - tokens_B
    places = torch.arange(sequence_M.numel(), device=sequence_M.device) - starts_B[sequence_M[by_sequence]]
    place_M = torch.empty_like(sequence_M).scatter(0, by_sequence, places)
    return place_M >= shortest_B[sequence_M]


def sequence_sums(values_M: torch.Tensor, sequence_M: torch.Tensor, sequences: int) -> torch.Tensor:
    """Return [B], the sum of each sequence's values; sequence_M: int64, the sequence each belongs to."""
    return values_M.new_zeros(sequences).index_add(0, sequence_M, values_M)
