"""Sequences with equal beginnings as one document, a trie: each beginning stands in the row once. And one rank's share
of all sequences, laid out so.

Samples of a prompt that share their first turns, forks of a conversation, rows that go on from one conversation. A node
of the trie is a segment, which sees the nodes above it. A token that several sequences predict there is one target for
each of them, so that every sequence keeps its own terms of the loss.

Worked example, prompt p q, three samples with targets in capitals, of which the first two share a turn A B and the
answer o to it:
    sequences    p q A B o C      p q A B o D E      p q F
    token        p q   A B o   C   D E   F
    segment      0 0   1 1 1   2   3 3   4
    position     0 1   2 3 4   5   5 6   2
    sees         -     0       0 1 0 1   0
    owners       -     0, 1    0   1     2
    targets      A B C (of 0), A B D E (of 1), F (of 2): A and B are computed once and listed twice

Beginnings are shared where it pays: a prompt always, and beyond it what is at least `least_tokens` long. The parts of a
sequence with forks stand in the document as sequences of their own; those that begin otherwise are further tries of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from training.utils.base.transfer import pinned
from training.utils.contracts.documents import Document, Segment, TokenSequence, plain
from training.utils.layout.planner import DocumentSize, PlanSettings, plain_size, plan_step
from training.utils.layout.rows import lacks_media, laid_out

if TYPE_CHECKING:
    import torch

    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rows import PromptRow
    from training.utils.contracts.token_rows import TokenRows

_FACTOR = np.int64(0x1E3779B97F4A7C15)  # odd, of no pattern
NEVER = sys.maxsize  # of `least_tokens`: nothing but prompts is shared


@dataclass(frozen=True)
class TrieNode:
    """begin, end: its tokens, in each of the sequences that hold it. sequences: their indices, ascending."""

    begin: int
    end: int
    sequences: tuple[int, ...]
    children: tuple[TrieNode, ...] = ()

    def size(self, before: int = 0) -> DocumentSize:
        """Return its size with its children's. before: tokens of the nodes above it, which it sees."""
        tokens = self.end - self.begin
        pairs = tokens * before + plain_size(tokens).pairs
        below = [child.size(before + tokens) for child in self.children]
        return DocumentSize(tokens + sum(each.tokens for each in below), pairs + sum(each.pairs for each in below))


def prompt_tokens(sequence: TokenSequence) -> int:
    """Return the tokens before the first target; all of a sequence without targets."""
    is_target = sequence.is_target.numpy()
    return int(is_target.argmax()) if is_target.any() else len(is_target)


def trie_document(sequences: Sequence[TokenSequence], least_tokens: int) -> Document:
    """Return a document of `sequences`, which begin with the same token; its i-th sequence is the i-th of their parts.
    Of one sequence it is `plain`, and of responses to one prompt that share fewer than `least_tokens` tokens behind it,
    `shared_prompt`."""
    sequences, forks = _parts(sequences)
    if len(sequences) == 1:
        return plain(sequences[0])
    segments: list[Segment] = []
    owners: list[tuple[int, ...]] = []
    ends = [0] * len(sequences)

    def place(node: TrieNode, sees: tuple[int, ...], position: int, predecessor: int | None) -> None:
        for begin, end, owning in _pieces(node, sequences):
            tokens = sequences[owning[0] if owning else node.sequences[0]].part(begin, end)
            segments.append(Segment(tokens, sees, position, predecessor))
            owners.append(owning)
            predecessor = len(segments) - 1
            sees, position = (*sees, predecessor), position + tokens.positions
        assert predecessor is not None, "a node has tokens"
        for sequence in node.sequences:
            if len(sequences[sequence]) == node.end:
                ends[sequence] = predecessor
        for child in node.children:
            place(child, sees, position, predecessor)

    for root in tries_of(sequences, least_tokens, forks):
        place(root, (), 0, None)
    return Document(tuple(segments), tuple(ends), tuple(owners))


def trie_size(sequences: Sequence[TokenSequence], least_tokens: int) -> DocumentSize:
    """Return the size of `trie_document`, without making it."""
    sequences, forks = _parts(sequences)
    if len(sequences) == 1:
        return plain_size(len(sequences[0]))
    roots = [root.size() for root in tries_of(sequences, least_tokens, forks)]
    return DocumentSize(sum(root.tokens for root in roots), sum(root.pairs for root in roots))


def tries_of(sequences: Sequence[TokenSequence], least_tokens: int, forks: bool = False) -> tuple[TrieNode, ...]:
    """Return the root of the trie of `sequences`, which begin with the same token; of forks, which may not, the roots
    of as many as it takes.

    A node ends where its sequences part, or at the end of their shortest prompt if they part fewer than `least_tokens`
    later. Below it, sequences share a node if they share at least that many tokens more, or the rest of a prompt.
    """
    keys, prompts = [_key(sequence) for sequence in sequences], [prompt_tokens(sequence) for sequence in sequences]
    order = sorted(range(len(keys)), key=lambda index: keys[index].tobytes())  # equal beginnings are neighbours
    shared = [0, *(_common(keys[one], keys[other]) for one, other in pairwise(order))]  # with the neighbour before

    def node(begin: int, first: int, last: int) -> TrieNode:
        held = order[first:last]
        end = min(shared[first + 1 : last], default=len(keys[held[0]]))
        prompt = min(prompts[index] for index in held)
        if begin < prompt <= end < prompt + least_tokens and len(held) > 1:
            end = prompt
        assert end > begin, "sequences of a trie begin with the same token"
        return TrieNode(begin, end, tuple(sorted(held)), behind(end, first, last))

    def behind(end: int, first: int, last: int) -> tuple[TrieNode, ...]:
        """The nodes that begin at `end`."""
        starts: list[int] = []
        for place in range(first, last):
            if len(keys[order[place]]) == end:
                continue
            both = prompts[order[place - 1]], prompts[order[place]]
            if not starts or not (shared[place] >= end + least_tokens or end < min(both) <= shared[place]):
                starts.append(place)
        nodes = [node(end, start, stop) for start, stop in pairwise([*starts, last])]
        return tuple(sorted(nodes, key=lambda each: each.sequences))

    return behind(0, 0, len(order)) if forks else (node(0, 0, len(order)),)


def _parts(sequences: Sequence[TokenSequence]) -> tuple[Sequence[TokenSequence], bool]:
    """Return the sequences without forks, or the parts of each; and whether there are forks."""
    if not any(sequence.forks for sequence in sequences):
        return sequences, False
    return [part for sequence in sequences for part in sequence.parts], True


def joined(parts: Sequence[Sequence[TokenSequence]], plan: PlanSettings) -> list[list[int]]:
    """Return indices of `parts` in groups that are one trie each: those whose first sequences begin with
    `least_shared_tokens` equal tokens, in rows of `max_row_tokens`. A part has the sequences of one prompt,
    and stays whole; without packed rows, or if nothing is to be shared, each is its own group.

    Where there are several ranks, a group has at most half of a rank's share of all tokens, so that the ranks still get
    about equally many.
    """
    least, most = plan.least_shared_tokens, plan.max_row_tokens
    if not (plan.packed and least):
        return [[index] for index in range(len(parts))]
    if plan.ranks > 1:
        most = min(most, sum(trie_size(part, least).tokens for part in parts) // (2 * plan.ranks))
    keys = [_key(part[0]) for part in parts]
    groups: list[list[int]] = []
    for index in sorted(range(len(keys)), key=lambda index: keys[index].tobytes()):
        wider = [*groups[-1], index] if groups else []
        if wider and _common(keys[groups[-1][-1]], keys[index]) >= least:
            sequences = [sequence for member in sorted(wider) for sequence in parts[member]]
            if trie_size(sequences, least).tokens <= most:
                groups[-1] = wider
                continue
        groups.append([index])
    return sorted(sorted(group) for group in groups)


def prompt_groups(sequences: Sequence[TokenSequence], least_tokens: int, most_tokens: int) -> list[list[int]]:
    """Return indices of the sequences that have one prompt (what precedes the first target), in groups of at most
    `most_tokens` as a trie."""
    open_groups: dict[bytes, tuple[list[int], int]] = {}  # prompt -> its last group, and its tokens at most
    groups: list[list[int]] = []
    for index, sequence in enumerate(sequences):
        prompt = prompt_tokens(sequence)
        key = _key(sequence)[:prompt].tobytes()
        group, tokens = open_groups.get(key, ([], prompt))
        tokens += len(sequence) - prompt
        if group and tokens > most_tokens:  # unless the responses share more than the prompt
            tokens = trie_size([sequences[member] for member in (*group, index)], least_tokens).tokens
        if not group or tokens > most_tokens:
            group, tokens = [], len(sequence)
            groups.append(group)
        group.append(index)
        open_groups[key] = (group, tokens)
    return groups


def _key(sequence: TokenSequence) -> np.ndarray:
    """Return int64 [T], equal where two sequences are: token ids, and at the places of a medium which one it is; with
    the experts that are to compute a token, where these are given, a hash of both."""
    ids: np.ndarray = sequence.input_ids.numpy()
    if sequence.experts is not None:
        own_TC = sequence.experts.flatten(1).numpy().astype(np.int64) + 2  # from 1 on
        ids = ids.copy()
        with np.errstate(over="ignore"):
            for column_T in own_TC.T:
                ids = (ids ^ (ids >> 29)) * _FACTOR + column_T
    if sequence.media:
        ids = ids.copy()
        for medium in sequence.media:
            ids[medium.begin : medium.end] = -1 - medium.key
    return ids


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many tokens two keys begin with alike."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _pieces(node: TrieNode, sequences: Sequence[TokenSequence]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Cut a node where other sequences own the targets: begin, end and the owners of each piece; none without
    targets."""
    masks = [sequences[index].is_target[node.begin : node.end].numpy() for index in node.sequences]
    owned_KT = np.stack(masks)  # K sequences, T tokens of the node
    columns = np.flatnonzero(owned_KT.any(axis=0))
    changes = (owned_KT[:, columns[1:]] != owned_KT[:, columns[:-1]]).any(axis=0)
    firsts = [*columns[:1], *columns[1:][changes]]  # the first target of each piece
    bounds = [node.begin, *(node.begin + int(first) for first in firsts[1:]), node.end]
    owning = [tuple(node.sequences[place] for place in np.flatnonzero(owned_KT[:, first])) for first in firsts]
    return [(*span, own) for span, own in zip(pairwise(bounds), owning or [()], strict=True)]


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
        sizes = [trie_size([sequences[index] for index in group], _least_tokens(plan)) for group in groups]
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


def _document(sequences: Sequence[TokenSequence], plan: PlanSettings) -> Document:
    if plan.form is None:
        return trie_document(sequences, _least_tokens(plan))
    cut = prompt_tokens(sequences[0])
    prompt, responses = sequences[0].part(0, cut), [item.part(cut, len(item)) for item in sequences]
    return plan.form.responses(prompt, responses, are_drawn=True)
