"""Ranked responses to a prompt, laid out for a pairwise loss: who should beat whom, and what it costs to compute.

Knows no model, no tokenizer and no loss.

Q pairs of responses to the same prompt, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from training.utils.layout.documents import Document, unshared
from training.utils.layout.rows import TokenRows, packed_rows


@dataclass(frozen=True)
class RankedRows:
    """A micro-batch of prompts with their responses as sequences, and which of them should beat which.

    better_Q, worse_Q: int64, indices of sequences (as in `rows.end_B` and `rows.sequence_M`). weight_Q: float32, each
    pair's share of its prompt; the pairs of one prompt add up to 1.
    """

    rows: TokenRows
    better_Q: torch.Tensor
    worse_Q: torch.Tensor
    weight_Q: torch.Tensor

    def to(self, device: torch.device) -> RankedRows:
        return RankedRows(
            self.rows.to(device), self.better_Q.to(device), self.worse_Q.to(device), self.weight_Q.to(device)
        )


def ranked_rows(rows: Sequence[Sequence[Document]], shared: bool, pad_token_id: int) -> RankedRows:
    """Lay out documents made by `shared_prompt`, responses best first, and list the pairs: i beats j where i < j.

    shared: the prompt once for all its responses; otherwise every response is a row of its own.
    """
    better: list[int] = []
    worse: list[int] = []
    weights: list[float] = []
    first = 0
    for document in (document for row in rows for document in row):
        pairs = list(combinations(range(first, first + len(document.ends)), 2))
        better += [winner for winner, _ in pairs]
        worse += [loser for _, loser in pairs]
        weights += [1.0 / len(pairs)] * len(pairs)
        first += len(document.ends)
    return RankedRows(
        rows=response_rows(rows, shared, pad_token_id),
        better_Q=torch.tensor(better, dtype=torch.int64),
        worse_Q=torch.tensor(worse, dtype=torch.int64),
        weight_Q=torch.tensor(weights, dtype=torch.float32),
    )


def response_rows(rows: Sequence[Sequence[Document]], shared: bool, pad_token_id: int) -> TokenRows:
    """Lay out documents made by `shared_prompt`; the responses are the sequences, in order.

    shared: the prompt once for all its responses; otherwise every response is a row of its own.
    """
    if not shared:
        rows = [[alone] for row in rows for document in row for alone in unshared(document)]
    return packed_rows(rows, pad_token_id)


def planned_tokens(prompt_tokens: int, response_tokens: Sequence[int], shared: bool) -> int:
    """Tokens that a prompt with its responses takes: what the planner bounds.

    shared: the prompt once; otherwise a row a response, each padded to the longest.
    """
    if shared:
        return prompt_tokens + sum(response_tokens)
    return len(response_tokens) * (prompt_tokens + max(response_tokens))


def real_tokens(prompt_tokens: int, response_tokens: Sequence[int], shared: bool) -> int:
    """Tokens computed for a prompt with its responses that are no padding."""
    copies = 1 if shared else len(response_tokens)
    return copies * prompt_tokens + sum(response_tokens)
