"""Segments and documents: what may share a row, and who sees whom in it.

A document is one or more segments that belong together: a plain sequence (one segment), a prompt with K responses
(K + 1 segments, the prompt stored and computed once), or a sequence with parallel paths (`layout.parallel`). Within
what a segment sees, attention is causal.
Knows no model, no tokenizer and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class TokenSequence:
    """A run of tokens before it is laid out.

    input_ids: int64 [length], length >= 1.
    is_target: bool [length]; True where the token is to be predicted.
    """

    input_ids: torch.Tensor
    is_target: torch.Tensor

    def __len__(self) -> int:
        return int(self.input_ids.numel())


@dataclass(frozen=True)
class Segment:
    """tokens: the segment's own. sees: earlier segments of its document that every token of it sees whole.
    first_position: position id of its first token. predecessor: the segment whose last token predicts the first
    token of this one; None where nothing does, and the first token is no target."""

    tokens: TokenSequence
    sees: tuple[int, ...] = ()
    first_position: int = 0
    predecessor: int | None = None


@dataclass(frozen=True)
class Document:
    """Segments in the order in which they stand in the row.

    ends: the segments at whose last token one of the document's sequences ends; their number is the number of
    sequences. owners: for each segment, the sequence (index into `ends`) that its targets belong to.
    No segment is empty: what it ends or predicts would be read at the token of another.
    """

    segments: tuple[Segment, ...]
    ends: tuple[int, ...]
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        for segment in self.segments:
            if len(segment.tokens) == 0:
                raise AssertionError("a segment has no tokens")
            if segment.predecessor is None and bool(segment.tokens.is_target[0]):
                raise AssertionError("the first token of a sequence has no predecessor and cannot be a target")

    @cached_property
    def tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    def __len__(self) -> int:
        return self.tokens


def plain(sequence: TokenSequence) -> Document:
    """One sequence by itself. Its first token has no predecessor and cannot be a target."""
    return Document((Segment(sequence),), ends=(0,), owners=(0,))


def shared_prompt(prompt: TokenSequence, responses: Sequence[TokenSequence]) -> Document:
    """A prompt and its responses, the prompt once. A response sees the prompt and itself; its positions go on from
    the prompt's; its first token is predicted by the prompt's last. The prompt's own targets, if any, belong to the
    first sequence."""
    trunk = Segment(prompt)
    branches = tuple(Segment(response, sees=(0,), first_position=len(prompt), predecessor=0) for response in responses)
    count = len(branches)
    return Document((trunk, *branches), ends=tuple(range(1, count + 1)), owners=(0, *range(count)))


def unshared(document: Document) -> list[Document]:
    """The same sequences, each by itself, what it sees repeated in front of it: the reference for the layout.

    A sequence whose every segment sees all before it becomes one segment; one with parallel paths keeps its segments.
    Targets that a repeated segment carries are kept in the sequence that owns them alone.
    """
    return [_by_itself(document, sequence) for sequence in range(len(document.ends))]


def _by_itself(document: Document, sequence: int) -> Document:
    own = [index for index, owner in enumerate(document.owners) if owner == sequence]
    chain = sorted({*own, *(seen for index in own for seen in document.segments[index].sees)})
    place = {index: number for number, index in enumerate(chain)}
    segments: list[Segment] = []
    for index in chain:
        part = document.segments[index]
        is_target = part.tokens.is_target if index in own else torch.zeros_like(part.tokens.is_target)
        segments.append(
            Segment(
                TokenSequence(part.tokens.input_ids, is_target),
                tuple(place[seen] for seen in part.sees),
                part.first_position,
                None if part.predecessor is None else place[part.predecessor],
            )
        )
    if all(len(part.sees) == number for number, part in enumerate(segments)):
        ids = torch.cat([part.tokens.input_ids for part in segments])
        return plain(TokenSequence(ids, torch.cat([part.tokens.is_target for part in segments])))
    return Document(tuple(segments), ends=(place[document.ends[sequence]],), owners=(0,) * len(segments))


def join(prompt_ids: torch.Tensor, response_ids: torch.Tensor) -> TokenSequence:
    """Return prompt + response as one sequence whose response tokens are the targets."""
    is_target = torch.zeros(prompt_ids.numel() + response_ids.numel(), dtype=torch.bool)
    is_target[prompt_ids.numel() :] = True
    return TokenSequence(torch.cat([prompt_ids, response_ids]), is_target)
