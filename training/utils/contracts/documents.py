"""Segments and documents: what shares a row, and who sees whom in it.

A document is one or more segments that belong together: a plain sequence (one segment), a prompt with K responses
(K + 1 segments, the prompt stored and computed once), sequences with equal beginnings (`layout.trie`), or a
sequence with parts that do not see each other (`contracts.drawing`). Attention is causal within what a segment sees.

Media are spans of a sequence's tokens. Which families count positions along the sides of a medium is decided by what
makes the spans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch

UNKNOWN = -1  # an expert that is not known, or not given


@dataclass(frozen=True)
class MediaSpan:
    """The tokens of one medium in a sequence.

    begin, tokens: where they stand.
    sides: height and width of the grid that the tokens are, row by row, where the model's positions count along both
        (M-RoPE, Qwen2-VL and later: Wang et al. 2024, "Qwen2-VL", section 2.1); None where they count on as in a text.
    key: names the medium for what reads it.
    sees_itself: each of its tokens sees all others, later ones too (Gemma 3).
    """

    begin: int
    tokens: int
    sides: tuple[int, int] | None = None
    key: int = 0
    sees_itself: bool = False

    def __post_init__(self) -> None:
        if self.sides is not None and self.sides[0] * self.sides[1] != self.tokens:
            raise AssertionError(f"a medium of {self.tokens} tokens cannot have the grid {self.sides}")

    @property
    def end(self) -> int:
        return self.begin + self.tokens

    @property
    def positions(self) -> int:
        """The distance from the medium's first token to the next token after it, in positions."""
        return self.tokens if self.sides is None else max(self.sides)


def positions_taken(length: int, media: Sequence[MediaSpan]) -> int:
    """Return the position of the token after a sequence of `length` tokens whose first is at 0."""
    return length - sum(medium.tokens - medium.positions for medium in media)


def media_between(media: Sequence[MediaSpan], begin: int, end: int) -> tuple[MediaSpan, ...]:
    """Return the media of the tokens [begin, end) of a sequence, counted from `begin`; AssertionError if that cuts
    one."""
    inside = [medium for medium in media if medium.begin < end and medium.end > begin]
    if any(medium.begin < begin or medium.end > end for medium in inside):
        raise AssertionError(f"tokens {begin} to {end} would cut a medium")
    return tuple(replace(medium, begin=medium.begin - begin) for medium in inside)


@dataclass(frozen=True)
class TokenSequence:
    """A run of tokens before it is laid out.

    input_ids: int64 [length], length >= 1.
    is_target: bool [length]; True where the token is to be predicted.
    media: in the order of their tokens, none of which is a target.
    forks: where it begins anew, ascending: the tokens from there on see nothing before. Of a conversation whose history
        a chat template writes otherwise.
    experts: int16 [length, layers, experts of a token], by which a mixture of experts is to compute them
        (UNKNOWN: by its own); None where it is free.
    """

    input_ids: torch.Tensor
    is_target: torch.Tensor
    media: tuple[MediaSpan, ...] = ()
    forks: tuple[int, ...] = ()
    experts: torch.Tensor | None = None

    def __len__(self) -> int:
        return int(self.input_ids.numel())

    @property
    def positions(self) -> int:
        """The position of the token after it, if its first is at 0: its length, unless media count by their sides."""
        return positions_taken(len(self), self.media)

    @property
    def parts(self) -> list[TokenSequence]:
        """Each run of tokens up to the next fork; the sequence itself, where there is none."""
        if not self.forks:
            return [self]
        return [self.part(begin, end) for begin, end in pairwise((0, *self.forks, len(self)))]

    def part(self, begin: int, end: int) -> TokenSequence:
        """Return the tokens [begin, end), with the media among them, as one run."""
        media = media_between(self.media, begin, end)
        experts = None if self.experts is None else self.experts[begin:end]
        return TokenSequence(self.input_ids[begin:end], self.is_target[begin:end], media, experts=experts)


def first_alike(sequences: Sequence[TokenSequence]) -> list[int]:
    """Return for each sequence the place of the first one that a model reads alike: of the same tokens, media, forks
    and experts."""
    first: dict[tuple[object, ...], int] = {}
    found = []
    for place, each in enumerate(sequences):
        experts = None if each.experts is None else each.experts.numpy().tobytes()
        key = (each.input_ids.cpu().numpy().tobytes(), each.media, each.forks, experts)
        found.append(first.setdefault(key, place))
    return found


@dataclass(frozen=True)
class Segment:
    """sees: earlier segments of its document that every token of it sees whole.
    first_position: position id of its first token.
    predecessor: the segment whose last token predicts the first token; None if the first token is not a target.
    """

    tokens: TokenSequence
    sees: tuple[int, ...] = ()
    first_position: int = 0
    predecessor: int | None = None


@dataclass(frozen=True)
class Document:
    """Segments in the order of the row. None is empty: its end would be read at the token of another.

    ends: for each sequence of the document, the segment that ends it.
    owners: for each segment, the sequences (indices into `ends`, ascending) that its targets belong to: each has a term
        of its own in the loss.
    """

    segments: tuple[Segment, ...]
    ends: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for segment in self.segments:
            if len(segment.tokens) == 0:
                raise AssertionError("a segment has no tokens")
            if segment.tokens.forks:
                raise AssertionError(
                    "a segment is one run of tokens; lay out the parts of a forked sequence separately"
                )
            if segment.predecessor is None and bool(segment.tokens.is_target[0]):
                raise AssertionError("the first token of a sequence has no predecessor and cannot be a target")

    @cached_property
    def tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """For each segment, how many of the document's sequences hold it: a shared prompt is in all of them."""
        holders = Counter(index for sequence in range(len(self.ends)) for index in self.held_by(sequence))
        return tuple(holders[index] for index in range(len(self.segments)))

    def held_by(self, sequence: int) -> list[int]:
        """Return the segments of a sequence, in order: those that it owns, the one that ends it, and what these see."""
        own = {index for index, owners in enumerate(self.owners) if sequence in owners} | {self.ends[sequence]}
        return sorted(own.union(*(self.segments[index].sees for index in own)))

    @cached_property
    def targets(self) -> int:
        """Targets of all its sequences: a token that several predict counts for each."""
        owned = zip(self.segments, self.owners, strict=True)
        return sum(len(owners) * int(segment.tokens.is_target.sum()) for segment, owners in owned)

    @cached_property
    def reads(self) -> int:
        """The tokens whose log-probabilities are computed: its targets, each once."""
        return sum(int(segment.tokens.is_target.sum()) for segment in self.segments)


def plain(sequence: TokenSequence) -> Document:
    """Return a document of one sequence, whose first token cannot be a target."""
    return Document((Segment(sequence),), ends=(0,), owners=((0,),))


def shared_prompt(prompt: TokenSequence, responses: Sequence[TokenSequence]) -> Document:
    """Return a document of a prompt and its responses. A response sees the prompt and itself, continues its positions,
    and its first token is predicted by the prompt's last. The prompt's own targets belong to the first sequence."""
    trunk = Segment(prompt)
    branches = tuple(
        Segment(response, sees=(0,), first_position=prompt.positions, predecessor=0) for response in responses
    )
    count = len(branches)
    owners = ((0,), *((number,) for number in range(count)))
    return Document((trunk, *branches), ends=tuple(range(1, count + 1)), owners=owners)


def unshared(document: Document) -> list[Document]:
    """Return each sequence as a document, preceded by a copy of what it sees: the reference for the layout.

    A sequence becomes one segment, if each of its segments sees all before it (no parts beside each other). Targets in
    copied segments stay only in the sequence that owns them.
    """
    return [_by_itself(document, sequence) for sequence in range(len(document.ends))]


def _by_itself(document: Document, sequence: int) -> Document:
    chain = document.held_by(sequence)
    place = {index: number for number, index in enumerate(chain)}
    segments: list[Segment] = []
    for index in chain:
        part = document.segments[index]
        is_target = part.tokens.is_target
        if sequence not in document.owners[index]:
            is_target = torch.zeros_like(is_target)
        tokens, sees = replace(part.tokens, is_target=is_target), tuple(place[seen] for seen in part.sees)
        before = None if part.predecessor is None else place[part.predecessor]
        segments.append(Segment(tokens, sees, part.first_position, before))
    if all(len(part.sees) == number for number, part in enumerate(segments)):
        return plain(together([part.tokens for part in segments]))
    return Document(tuple(segments), ends=(place[document.ends[sequence]],), owners=((0,),) * len(segments))


def together(parts: Sequence[TokenSequence]) -> TokenSequence:
    """Return the tokens of several sequences, one after the other, as one."""
    begins = accumulate(map(len, parts), initial=0)
    media = [
        replace(medium, begin=begin + medium.begin)
        for begin, part in zip(begins, parts, strict=False)
        for medium in part.media
    ]
    ids, is_target = (torch.cat([getattr(part, name) for part in parts]) for name in ("input_ids", "is_target"))
    experts = None if any(part.experts is None for part in parts) else torch.cat([part.experts for part in parts])  # type: ignore[misc]
    return TokenSequence(ids, is_target, tuple(media), experts=experts)


def join(prompt_ids: torch.Tensor, response_ids: torch.Tensor) -> TokenSequence:
    """Return prompt + response as one sequence whose response tokens are the targets."""
    is_target = torch.zeros(prompt_ids.numel() + response_ids.numel(), dtype=torch.bool)
    is_target[prompt_ids.numel() :] = True
    return TokenSequence(torch.cat([prompt_ids, response_ids]), is_target)
