"""Rows of phases 1 and 2 as the layout's documents."""

from __future__ import annotations

import numpy as np
import torch

from training.utils.data.phases import ResponsesRow, SentenceRow
from training.utils.layout.documents import Document, TokenSequence, plain, shared_prompt


def sentence_document(row: SentenceRow) -> Document:
    """One sequence; its targets are the tokens of the row's loss mask."""
    return plain(TokenSequence(torch.tensor(row.input_ids, dtype=torch.int64), torch.tensor(row.loss_mask)))


def responses_document(row: ResponsesRow, are_targets: bool) -> Document:
    """The prompt, stored once, and its responses, best first. are_targets: whether the responses' tokens are to be
    predicted (a policy reads log-probabilities there; a reward model predicts nothing)."""

    def run(ids: np.ndarray, is_target: bool) -> TokenSequence:
        tokens = torch.tensor(ids, dtype=torch.int64)
        return TokenSequence(tokens, torch.full((len(ids),), is_target))

    return shared_prompt(run(row.prompt_ids, False), [run(ids, are_targets) for ids in row.response_ids])
