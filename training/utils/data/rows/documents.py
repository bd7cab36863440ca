"""Rows as what models read: the layout's documents, and the prompts of phase 3 as one left-padded batch.

Masks come from lengths, never from ids: pad may be eos. Shape suffixes: B sequences, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from training.utils.contracts.documents import Document, TokenSequence, join, plain, shared_prompt
from training.utils.contracts.rows import PromptRow, ResponsesRow, SentenceRow
from training.utils.data.rows.tokenize import require_pad_token
from training.utils.layout.trie import joined, trie_document, trie_size

if TYPE_CHECKING:
    from training.utils.layout.planner import DocumentSize, PlanSettings

_STANDING_IN = 4  # tokens of a response that is not drawn yet


def sentence_document(row: SentenceRow) -> Document:
    """One sequence; its targets are the tokens of the row's loss mask."""
    sequence = _sentence(row)
    return plain(sequence) if row.form is None else row.form.sentence(sequence)


def _sentence(row: SentenceRow) -> TokenSequence:
    return TokenSequence(torch.tensor(row.input_ids, dtype=torch.int64), torch.tensor(row.loss_mask), row.media)


def responses_document(row: ResponsesRow, are_targets: bool) -> Document:
    """The prompt, stored once, and its responses, best first. are_targets: whether the responses are to be predicted (a
    policy's log-probabilities are read there; a reward model predicts nothing)."""

    def run(ids: np.ndarray, is_target: bool) -> TokenSequence:
        tokens = torch.tensor(ids, dtype=torch.int64)
        return TokenSequence(tokens, torch.full((len(ids),), is_target))

    prompt = replace(run(row.prompt_ids, False), media=row.media)
    responses = [run(ids, are_targets) for ids in row.response_ids]
    if row.form is None:
        return shared_prompt(prompt, responses)
    return row.form.responses(prompt, responses, row.are_drawn)


def prompt_document(row: PromptRow) -> Document:
    """A prompt of phase 3 and a response that stands for those that will be drawn, to read a model by: the prompt's
    first tokens that are no medium's, which are to be predicted."""
    ids = torch.from_numpy(row.flipped_prompt_ids[::-1].astype(np.int64))
    is_text = torch.ones(len(ids), dtype=torch.bool)
    for medium in row.media:
        is_text[medium.begin : medium.end] = False
    return plain(replace(join(ids, ids[is_text][:_STANDING_IN]), media=row.media))


def row_groups(rows: Sequence[SentenceRow | ResponsesRow], plan: PlanSettings) -> list[list[int]]:
    """Return indices of the rows that are one document (`trie.joined`): each by itself, unless `plan` has equal
    beginnings shared. Rows with a form never do."""
    if not (plan.packed and plan.least_shared_tokens):
        return [[index] for index in range(len(rows))]
    plain_rows = [index for index, row in enumerate(rows) if row.form is None]
    joined_places = joined([_sequences(rows[index]) for index in plain_rows], plan)
    groups = [[plain_rows[place] for place in group] for group in joined_places]
    return sorted([*groups, *([index] for index, row in enumerate(rows) if row.form is not None)])


def group_size(rows: Sequence[SentenceRow | ResponsesRow], plan: PlanSettings) -> DocumentSize:
    """Return the size of `group_document`."""
    return trie_size([sequence for row in rows for sequence in _sequences(row)], plan.least_shared_tokens)


def shared_share(rows: Sequence[SentenceRow | ResponsesRow], plan: PlanSettings) -> float:
    """Return the share of a step's tokens that `plan`, which has equal beginnings shared, spares."""
    alone = sum(group_size([row], plan).tokens for row in rows)
    groups = row_groups(rows, plan)
    together = sum(group_size([rows[index] for index in group], plan).tokens for group in groups)
    return 1 - together / alone


def group_document(
    rows: Sequence[SentenceRow | ResponsesRow], plan: PlanSettings, are_targets: bool = True
) -> Document:
    """Return several rows with equal beginnings as one document, of the sequences of one row after the other.
    are_targets: see `responses_document`."""
    sequences = [sequence for row in rows for sequence in _sequences(row)]
    document = trie_document(sequences, plan.least_shared_tokens)
    if are_targets:
        return document
    untrained = [
        replace(each, tokens=replace(each.tokens, is_target=torch.zeros_like(each.tokens.is_target)))
        for each in document.segments
    ]
    return replace(document, segments=tuple(untrained))


def _sequences(row: SentenceRow | ResponsesRow) -> list[TokenSequence]:
    if isinstance(row, SentenceRow):
        return [_sentence(row)]
    prompt, *responses = (torch.tensor(ids, dtype=torch.int64) for ids in (row.prompt_ids, *row.response_ids))
    return [replace(join(prompt, response), media=row.media) for response in responses]


# Prompts as a batch.


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Left-padded prompts.

    prompt_ids_BP: int64.
    prompt_mask_BP: bool, True on the prompt's tokens, False on padding.
    rows: the B rows, in order.

    Worked example, prompts (5, 6, 7) and (8,), pad 0:
    prompt_ids_BP ((5, 6, 7), (0, 0, 8)), prompt_mask_BP ((T, T, T), (F, F, T)).
    """

    prompt_ids_BP: torch.Tensor
    prompt_mask_BP: torch.Tensor
    rows: tuple[PromptRow, ...]


def collate_prompts(rows: Sequence[PromptRow], pad_token_id: int | None) -> PromptBatch:
    """Left-pad prompts to the longest. Raises ThreestepError without a pad token, ValueError without rows."""
    pad = require_pad_token(pad_token_id, "a batch of prompts")
    if not rows:
        raise ValueError("a batch of prompts needs at least one row, got none")
    flipped = [torch.tensor(row.flipped_prompt_ids, dtype=torch.int64) for row in rows]
    ids_BP = pad_sequence(flipped, batch_first=True, padding_value=pad).flip(1)
    mask_BP = pad_sequence([torch.ones(len(ids), dtype=torch.bool) for ids in flipped], batch_first=True).flip(1)
    return PromptBatch(prompt_ids_BP=ids_BP, prompt_mask_BP=mask_BP, rows=tuple(rows))
