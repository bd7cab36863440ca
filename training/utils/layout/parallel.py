"""Parallel thinking as a token layout: blocks of paths that do not see each other.

A block is `<Parallel> <Path> ... </Path> <Path> ... </Path> </Parallel>` (Zheng et al. 2025, Parallel-R1, after
Multiverse, Yang et al. 2025). Its segments:

- the trunk before it, with `<Parallel>` and whatever stands between it and the first `<Path>`: the block's opening;
- each path: `<Path>`, its thoughts, `</Path>`, and whatever stands between that and the next path or the block's end.
  A path sees the trunk before it and itself;
- the trunk after it, from `</Parallel>` on: it sees all that stands before it. It is the opening of the next block.

Positions: every path starts behind the opening, and the trunk goes on behind the longest path. Every `<Path>` is
predicted from the opening's last token, as the paths of a block start from one state when they are generated side by
side; `</Parallel>` is predicted from the last token of the last path, the token before it in the text, as the end of a
path is where a model closes the block.

Worked example, tags ( < > ) for the four, trunk p q, paths a b and c, then d:
    token        p q (   < a b >   < c >   ) d
    segment      0 0 0   1 1 1 1   2 2 2   3 3
    position     0 1 2   3 4 5 6   3 4 5   7 8
    sees         -       0         0       0 1 2
    predicted
    from         - p q   ( < a b   ( < c   > )     (the > of path 2)

T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from training.utils.layout.documents import Document, Segment, TokenSequence


@dataclass(frozen=True)
class ParallelTags:
    """The token ids of `<Parallel>`, `<Path>`, `</Path>` and `</Parallel>`; no two are the same."""

    open_block: int
    open_path: int
    close_path: int
    close_block: int


@dataclass(frozen=True)
class Block:
    """paths: the column of each path's opening tag. end: the column of the block's closing tag; None where the text
    ends inside the block."""

    paths: tuple[int, ...]
    end: int | None


class MalformedBlocks(Exception):
    """Tags that make no blocks: `reason` says which rule is broken, `column` at which token (the text's length where
    something is still open at its end)."""

    def __init__(self, reason: str, column: int) -> None:
        super().__init__(f"token {column}: {reason}")
        self.reason = reason
        self.column = column


def find_blocks(
    input_ids: torch.Tensor, tags: ParallelTags, is_written: torch.Tensor | None = None, cut: bool = False
) -> tuple[Block, ...]:
    """The blocks of a text, in order.

    input_ids: int64 [T]. is_written: bool [T], True where a tag's id is a tag: the tokens that a model writes, for a
    prompt may quote the tags; None counts all. cut: the text was cut at its end, so a block may be open there.
    Raises MalformedBlocks for a stray, missing or repeated tag, a block in a block, a path or a block with nothing in
    it, and a block that goes on through text that the model does not write.
    """
    is_tag = torch.isin(input_ids, torch.tensor(astuple(tags)))
    if is_written is not None:
        is_tag = is_tag & is_written
    blocks: list[Block] = []
    paths: list[int] = []
    in_block = in_path = False
    opened = 0
    for column in torch.nonzero(is_tag).flatten().tolist():
        tag = int(input_ids[column])
        reason = _what_is_wrong(tag, tags, in_block, in_path, paths, column)
        if reason is not None:
            raise MalformedBlocks(reason, column)
        if tag == tags.open_block:
            in_block, paths, opened = True, [], column
        elif tag == tags.close_block:
            in_block = False
            _check_written(is_written, opened, column)
            blocks.append(Block(tuple(paths), column))
        else:
            in_path = tag == tags.open_path
            if in_path:
                paths.append(column)
    if in_block and not cut:
        raise MalformedBlocks(f"the text ends in an open {'path' if in_path else 'block'}", len(input_ids))
    if in_block:
        _check_written(is_written, opened, len(input_ids))
        blocks.append(Block(tuple(paths), None))
    return tuple(blocks)


def _check_written(is_written: torch.Tensor | None, start: int, stop: int) -> None:
    unwritten = [] if is_written is None else torch.nonzero(~is_written[start:stop]).flatten().tolist()
    if unwritten:
        raise MalformedBlocks("a block holds text that the model does not write", start + unwritten[0])


def _what_is_wrong(
    tag: int, tags: ParallelTags, in_block: bool, in_path: bool, paths: Sequence[int], column: int
) -> str | None:
    """The rule that `tag`, standing here, breaks."""
    if tag == tags.open_block:
        return "a block opens inside a block" if in_block else None
    if tag == tags.open_path:
        if not in_block:
            return "a path opens outside a block"
        return "a path opens inside a path" if in_path else None
    if tag == tags.close_path:
        if not in_path:
            return "a path closes that was not opened"
        return "a path is empty" if paths[-1] == column - 1 else None
    if not in_block:
        return "a block closes that was not opened"
    if in_path:
        return "a block closes before its last path"
    return None if paths else "a block has no paths"


def parallel_document(sequence: TokenSequence, tags: ParallelTags, is_written: torch.Tensor | None = None) -> Document:
    """One sequence whose blocks are laid out side by side; without blocks it is `plain(sequence)`.

    is_written: see `find_blocks`. A sequence that ends inside a block, as truncation leaves it, is laid out as the
    beginning of the whole one. Raises MalformedBlocks.
    """
    blocks = find_blocks(sequence.input_ids, tags, is_written, cut=True)
    segments = _segments(sequence, blocks, seen=(), position=0, predecessor=None, segments_before=0)
    return Document(tuple(segments), ends=(len(segments) - 1,), owners=(0,) * len(segments))


def shared_prompt_in_parallel(
    prompt: TokenSequence, responses: Sequence[TokenSequence], tags: ParallelTags
) -> Document:
    """As `shared_prompt`, with the blocks of each response laid out side by side; the prompt has none.

    Raises MalformedBlocks.
    """
    segments, owners, ends = [Segment(prompt)], [0], []
    for number, response in enumerate(responses):
        blocks = find_blocks(response.input_ids, tags, cut=True)
        own = _segments(response, blocks, seen=(0,), position=len(prompt), predecessor=0, segments_before=len(segments))
        segments += own
        owners += [number] * len(own)
        ends.append(len(segments) - 1)
    return Document(tuple(segments), tuple(ends), tuple(owners))


def _segments(
    sequence: TokenSequence,
    blocks: Sequence[Block],
    seen: tuple[int, ...],
    position: int,
    predecessor: int | None,
    segments_before: int,
) -> list[Segment]:
    """The segments of `sequence`, which sees `seen`, starts at `position` and is predicted from `predecessor`."""
    made: list[Segment] = []

    def add(start: int, stop: int, sees: tuple[int, ...], first_position: int, predicted_from: int | None) -> int:
        part = TokenSequence(sequence.input_ids[start:stop], sequence.is_target[start:stop])
        made.append(Segment(part, sees, first_position, predicted_from))
        return segments_before + len(made) - 1

    start = 0
    for block in blocks:
        if not block.paths:  # cut behind the block's opening
            break
        opening = add(start, block.paths[0], seen, position, predecessor)
        seen = (*seen, opening)
        position += block.paths[0] - start
        stops = (*block.paths[1:], len(sequence) if block.end is None else block.end)
        spans = list(zip(block.paths, stops, strict=True))
        paths = tuple(add(first, stop, seen, position, opening) for first, stop in spans)
        seen = (*seen, *paths)
        position += max(stop - first for first, stop in spans)
        predecessor = paths[-1]
        start = stops[-1]
    if start < len(sequence):
        add(start, len(sequence), seen, position, predecessor)
    return made
