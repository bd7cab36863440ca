"""Rows of phases 1 and 2 as the layout's documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from training.utils.data.rows.phases import ResponsesRow, SentenceRow
from training.utils.layout.documents import Document, TokenSequence, plain, shared_prompt
from training.utils.layout.parallel import ParallelTags, drawn_document, parallel_document, shared_prompt_in_parallel


def sentence_document(row: SentenceRow) -> Document:
    """One sequence; its targets are the tokens of the row's loss mask. With parallel thinking, tags count where the
    model writes them; in a prompt that quotes them, they are text."""
    sequence = TokenSequence(torch.tensor(row.input_ids, dtype=torch.int64), torch.tensor(row.loss_mask), row.images)
    if row.parallel_tags is None:
        return plain(sequence)
    return parallel_document(sequence, ParallelTags(*row.parallel_tags), written_tokens(sequence.is_target))


def written_tokens(is_target: torch.Tensor) -> torch.Tensor:
    """bool [T], True where the model writes: at targets, and at a first token that would be one if a token preceded."""
    written = is_target.clone()
    written[:1] = is_target[1:2].any()
    return written


def responses_document(row: ResponsesRow, are_targets: bool) -> Document:
    """The prompt, stored once, and its responses, best first. are_targets: whether the responses are to be predicted (a
    policy's log-probabilities are read there; a reward model predicts nothing)."""

    def run(ids: np.ndarray, is_target: bool) -> TokenSequence:
        tokens = torch.tensor(ids, dtype=torch.int64)
        return TokenSequence(tokens, torch.full((len(ids),), is_target))

    prompt = replace(run(row.prompt_ids, False), images=row.images)
    responses = [run(ids, are_targets) for ids in row.response_ids]
    if row.parallel_tags is None:
        return shared_prompt(prompt, responses)
    lay_out = drawn_document if row.are_drawn else shared_prompt_in_parallel
    return lay_out(prompt, responses, ParallelTags(*row.parallel_tags))
