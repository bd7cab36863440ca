"""One rank's share of all ranks' sequences, as micro-batches in which the responses to one prompt may share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from training.utils.layout.documents import Document, TokenSequence, plain, shared_prompt
from training.utils.layout.parallel import ParallelTags, drawn_document
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.rows import TokenRows, packed_rows
from training.utils.layout.transfer import pinned


class SequenceRows(NamedTuple):
    """A micro-batch. indices: of its sequences, in the order of the rows."""

    indices: list[int]
    rows: TokenRows


def rank_share(
    sequences: Sequence[TokenSequence],
    plan: PlanSettings,
    pad_token_id: int,
    rank: int,
    device: torch.device,
    sharing: bool = True,
    with_before: bool = False,
) -> list[SequenceRows]:
    """Return the share of `rank` in all ranks' sequences: every rank has the same number of micro-batches, and nearly
    the same number of tokens. They lie on the CPU, pinned if `device` is a GPU. sharing: the sequences are prompts with
    responses; those to one prompt share it, if documents may share rows. with_before: the rows have `before_NT`."""
    groups = _groups(sequences, plan, sharing)
    mine = plan_step([_tokens([sequences[index] for index in group]) for group in groups], plan)[rank]
    micro_batches = [[[groups[place] for place in row] for row in rows] for rows in mine]
    tags = plan.tags if sharing else None  # of drawn responses alone: other texts may quote them
    shares = [_laid_out(sequences, rows, tags, pad_token_id, with_before) for rows in micro_batches]
    return [share._replace(rows=pinned(share.rows, device)) for share in shares]


def documents_of(sequences: Sequence[TokenSequence], plan: PlanSettings) -> list[Document]:
    """Return the documents that `rank_share` packs, of all ranks."""
    groups = _groups(sequences, plan, sharing=True)
    return [_document([sequences[index] for index in group], plan.tags) for group in groups]


def _groups(sequences: Sequence[TokenSequence], plan: PlanSettings, sharing: bool) -> list[list[int]]:
    """Return the indices of the sequences in each document."""
    if plan.packed and sharing:
        return shared_groups(sequences, plan.max_row_tokens)
    return [[index] for index in range(len(sequences))]


def _laid_out(
    sequences: Sequence[TokenSequence],
    rows: Sequence[Sequence[Sequence[int]]],
    tags: ParallelTags | None,
    pad_token_id: int,
    with_before: bool,
) -> SequenceRows:
    """Return a micro-batch of rows of documents, each of which is the indices of its sequences."""
    documents = [[_document([sequences[index] for index in group], tags) for group in row] for row in rows]
    indices = [index for row in rows for group in row for index in group]
    return SequenceRows(indices, packed_rows(documents, pad_token_id, with_before=with_before))


def shared_groups(sequences: Sequence[TokenSequence], most_tokens: int) -> list[list[int]]:
    """Return indices of the sequences that have one prompt (what precedes the first target), in groups of at most
    `most_tokens` with the prompt counted once."""
    open_groups: dict[bytes, tuple[list[int], int]] = {}  # prompt -> its last group, and its tokens
    groups: list[list[int]] = []
    for index, sequence in enumerate(sequences):
        prompt_tokens = _prompt_tokens(sequence)
        prompt = sequence.input_ids[:prompt_tokens].numpy().tobytes()
        group, tokens = open_groups.get(prompt, ([], prompt_tokens))
        response_tokens = len(sequence) - prompt_tokens
        if not group or tokens + response_tokens > most_tokens:
            group, tokens = [], prompt_tokens
            groups.append(group)
        group.append(index)
        open_groups[prompt] = (group, tokens + response_tokens)
    return groups


def _prompt_tokens(sequence: TokenSequence) -> int:
    return int(sequence.is_target.numpy().argmax())


def _tokens(sequences: Sequence[TokenSequence]) -> int:
    """Return the tokens of `_document`, without making it: a rank makes its own alone."""
    shared = _prompt_tokens(sequences[0]) * (len(sequences) - 1) if len(sequences) > 1 else 0
    return sum(map(len, sequences)) - shared


def _document(sequences: Sequence[TokenSequence], tags: ParallelTags | None) -> Document:
    if len(sequences) == 1 and tags is None:
        return plain(sequences[0])
    cut = _prompt_tokens(sequences[0])
    prompt, responses = sequences[0].part(0, cut), [item.part(cut, len(item)) for item in sequences]
    return shared_prompt(prompt, responses) if tags is None else drawn_document(prompt, responses, tags)
