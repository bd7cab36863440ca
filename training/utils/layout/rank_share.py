"""One rank's share of all ranks' sequences, as micro-batches in which sequences may share equal beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from training.utils.layout.documents import Document, TokenSequence
from training.utils.layout.parallel import drawn_document
from training.utils.layout.pictures import RowImages, lacks_images, laid_out
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.rows import TokenRows
from training.utils.layout.transfer import pinned
from training.utils.layout.trie import NEVER, joined, prompt_groups, prompt_tokens, trie_document, trie_tokens


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
    images: RowImages | None = None,
) -> list[SequenceRows]:
    """Return the share of `rank` in all ranks' sequences: every rank has the same number of micro-batches, and nearly
    the same number of tokens. They lie on the CPU, pinned if `device` is a GPU. sharing: the sequences are prompts with
    responses; those to one prompt share it, and what else `plan` says, if documents may share rows. with_before: the
    rows have `before_NT`. images: of the sequences, whose rows get their pixels; None where none has one."""
    if not sharing:  # tags are of drawn responses alone: other texts may quote them
        plan = replace(plan, tags=None)
    groups = _groups(sequences, plan, sharing)
    step = plan_step([_tokens([sequences[index] for index in group], plan) for group in groups], plan)
    lacking = lacks_images(step, rank, [any(sequences[index].images for index in group) for group in groups])
    shares = []
    for micro_batch, lacks in zip(step[rank], lacking, strict=True):
        members = [[groups[place] for place in row] for row in micro_batch]
        documents = [[_document([sequences[index] for index in group], plan) for group in row] for row in members]
        rows = laid_out(documents, pad_token_id, images, lacks, with_before)
        indices = [index for row in members for group in row for index in group]
        shares.append(SequenceRows(indices, pinned(rows, device)))
    return shares


def documents_of(sequences: Sequence[TokenSequence], plan: PlanSettings) -> list[Document]:
    """Return the documents that `rank_share` packs, of all ranks."""
    groups = _groups(sequences, plan, sharing=True)
    return [_document([sequences[index] for index in group], plan) for group in groups]


def _groups(sequences: Sequence[TokenSequence], plan: PlanSettings, sharing: bool) -> list[list[int]]:
    """Return the indices of the sequences in each document."""
    if not (plan.packed and sharing):
        return [[index] for index in range(len(sequences))]
    least = _least_tokens(plan)
    groups = prompt_groups(sequences, least, plan.max_row_tokens)
    if least == NEVER:
        return groups
    parts = [[sequences[index] for index in group] for group in groups]
    return [[index for part in found for index in groups[part]] for found in joined(parts, plan)]


def _least_tokens(plan: PlanSettings) -> int:
    """Blocks of paths begin where they were drawn: their responses share a prompt alone."""
    return NEVER if plan.tags is not None else plan.least_shared_tokens or NEVER


def _tokens(sequences: Sequence[TokenSequence], plan: PlanSettings) -> int:
    """Return the tokens of `_document`, without making it: a rank makes its own alone."""
    return trie_tokens(sequences, _least_tokens(plan))


def _document(sequences: Sequence[TokenSequence], plan: PlanSettings) -> Document:
    if plan.tags is None:
        return trie_document(sequences, _least_tokens(plan))
    cut = prompt_tokens(sequences[0])
    prompt, responses = sequences[0].part(0, cut), [item.part(cut, len(item)) for item in sequences]
    return drawn_document(prompt, responses, plan.tags)
