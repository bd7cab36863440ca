"""One rank's share of all ranks' sequences, as micro-batches in which sequences may share equal beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.transfer import pinned
from training.utils.contracts.documents import Document, TokenSequence, plain
from training.utils.layout.planner import DocumentSize, PlanSettings, plan_step
from training.utils.layout.rows import lacks_media, laid_out
from training.utils.layout.trie import NEVER, joined, prompt_groups, prompt_tokens, trie_document, trie_size

if TYPE_CHECKING:
    import torch

    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rows import PromptRow
    from training.utils.contracts.token_rows import TokenRows


class SequenceRows(NamedTuple):
    """A micro-batch. indices: of its sequences, in the order of the rows."""

    indices: list[int]
    rows: TokenRows


@dataclass(frozen=True)
class SequenceLayout:
    """The layout of sequences as micro-batches. rank: this one, of plan.ranks. media: of the prompts, which their rows
    get; None where none has some. sharing: ranks that share rows, to which one share is dealt."""

    plan: PlanSettings
    pad_token_id: int
    rank: int = 0
    media: RunMedia | None = None
    sharing: int = 1

    @property
    def dealt(self) -> PlanSettings:
        """The plan of the groups of ranks that share rows."""
        return replace(self.plan, ranks=self.plan.ranks // self.sharing)

    def media_of(self, prompts: Sequence[PromptRow]) -> Any:
        """Return what a rollout reads of the media of prompts (`RolloutRequest.media`); None where none has some."""
        return None if self.media is None else self.media.of_prompts([row.media for row in prompts])


def rank_share(
    sequences: Sequence[TokenSequence],
    layout: SequenceLayout,
    device: torch.device,
    *,
    sharing: bool = True,
    with_before: bool = False,
) -> list[SequenceRows]:
    """Return this rank's share of all ranks' sequences: every rank has the same number of micro-batches, and nearly
    the same number of tokens. They lie on the CPU, pinned if `device` is a GPU. sharing: the sequences are prompts with
    responses; those to one prompt share it, and what else the plan says, if documents may share rows. with_before: the
    rows have `before_NT`."""
    plan, share = layout.dealt, layout.rank // layout.sharing
    if not sharing:  # the form is that of drawn responses alone
        plan = replace(plan, form=None)
    groups = _groups(sequences, plan, sharing)
    if plan.packed:
        sizes = [_size([sequences[index] for index in group], plan) for group in groups]
        step = plan_step([size.tokens for size in sizes], plan, pairs=[size.pairs for size in sizes])
    else:
        parts = [sequences[group[0]].parts for group in groups]
        step = plan_step([max(map(len, each)) for each in parts], plan, [len(each) for each in parts])
    lacking = lacks_media(step, share, [any(sequences[index].media for index in group) for group in groups])
    shares = []
    for micro_batch, lacks in zip(step[share], lacking, strict=True):
        members = [[groups[place] for place in row] for row in micro_batch]
        filled = [_rows([[sequences[index] for index in group] for group in row], plan) for row in members]
        rows = laid_out(
            [row for each in filled for row in each], layout.pad_token_id, layout.media, lacks, with_before=with_before
        )
        indices = [index for row in members for group in row for index in group]
        if any(sequences[index].forks for index in indices):
            rows = rows.of_whole_sequences([len(sequences[index].parts) for index in indices])
        shares.append(SequenceRows(indices, pinned(rows, device)))
    return shares


def documents_of(sequences: Sequence[TokenSequence], plan: PlanSettings) -> list[Document]:
    """Return the documents that `rank_share` packs, of all ranks."""
    groups = [[sequences[index] for index in group] for group in _groups(sequences, plan, sharing=True)]
    return [document for group in groups for row in _rows([group], plan) for document in row]


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
    """Responses with a form share a prompt alone: their parts begin where they were drawn."""
    return NEVER if plan.form is not None else plan.least_shared_tokens or NEVER


def _rows(groups: Sequence[Sequence[TokenSequence]], plan: PlanSettings) -> list[list[Document]]:
    """Return a row of documents; several where each part of a sequence with forks has a row of its own."""
    if not plan.packed and groups[0][0].forks:
        return [[plain(part)] for part in groups[0][0].parts]
    return [[_document(group, plan) for group in groups]]


def _size(sequences: Sequence[TokenSequence], plan: PlanSettings) -> DocumentSize:
    """Return the size of `_document`, without making it: a rank makes its own alone."""
    return trie_size(sequences, _least_tokens(plan))


def _document(sequences: Sequence[TokenSequence], plan: PlanSettings) -> Document:
    if plan.form is None:
        return trie_document(sequences, _least_tokens(plan))
    cut = prompt_tokens(sequences[0])
    prompt, responses = sequences[0].part(0, cut), [item.part(cut, len(item)) for item in sequences]
    return plan.form.responses(prompt, responses, are_drawn=True)
