"""Parallel thinking as a token layout: blocks of paths that do not see each other.

A block is `<Parallel> <Path> ... </Path> <Path> ... </Path> </Parallel>` (Zheng et al. 2025, Parallel-R1, after
Multiverse, Yang et al. 2025). Its segments:

- the trunk before it, up to the first `<Path>`: the block's opening;
- each path, from `<Path>` to the next path or the block's end; it sees the trunk before it and itself;
- the trunk after it, from `</Parallel>` on: it sees all before it, and is the opening of the next block.

Positions: every path starts after the opening, and the trunk continues after the longest path. Every `<Path>` is
predicted from the opening's last token: paths that are generated side by side start from one state. `</Parallel>` is
predicted from the token before it in the text, the last one of the last path, where a model closes the block.

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
from typing import ClassVar

import torch

from training.utils.contracts.documents import Document, Segment, TokenSequence, together


@dataclass(frozen=True)
class ParallelTags:
    """The token ids of `<Parallel>`, `<Path>`, `</Path>` and `</Parallel>`; no two are the same. As a `RowForm`: the
    blocks that they make."""

    open_block: int
    open_path: int
    close_path: int
    close_block: int

    figure: ClassVar[str] = "with_paths"

    @property
    def numbers(self) -> tuple[int, ...]:
        return astuple(self)

    def sentence(self, sequence: TokenSequence) -> Document:
        """Lay a sentence out. Tags count where the model writes them; in a prompt that quotes them, they are text."""
        return parallel_document(sequence, self, written_tokens(sequence.is_target))

    def responses(self, prompt: TokenSequence, responses: Sequence[TokenSequence], are_drawn: bool) -> Document:
        """Lay responses out. are_drawn: side by side, by a model: a tag out of place is text."""
        return (drawn_document if are_drawn else shared_prompt_in_parallel)(prompt, responses, self)


@dataclass(frozen=True)
class PathSampling:
    """Blocks of paths that are drawn side by side.

    count: paths of each block. most_tokens: of a path with its tags, 2 or more; None: what is left of the response.
    """

    tags: ParallelTags
    count: int
    most_tokens: int | None = None


@dataclass(frozen=True)
class Block:
    """paths: the columns of the paths' opening tags. end: the column of the closing tag; None if the text ends
    inside the block."""

    paths: tuple[int, ...]
    end: int | None


class MalformedBlocks(Exception):
    """Tags that do not match: `token COLUMN: the rule that is broken`, at the text's length for what is open at its
    end."""


def written_tokens(is_target: torch.Tensor) -> torch.Tensor:
    """bool [T], True where the model writes: at targets, and at a first token that would be one if a token preceded."""
    written = is_target.clone()
    written[:1] = is_target[1:2].any()
    return written


def find_blocks(
    input_ids: torch.Tensor, tags: ParallelTags, is_written: torch.Tensor | None = None, cut: bool = False
) -> tuple[Block, ...]:
    """Return the blocks of a text, in order.

    input_ids: int64 [T].
    is_written: bool [T], True where a tag's id is a tag: tokens that the model writes (a prompt may quote the tags).
    cut: the text was truncated, so a block may be open at its end.
    Raises MalformedBlocks for a stray, missing or repeated tag, a block in a block, an empty path or block, and a block
    that continues through text that the model does not write.
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
        reason = _what_is_wrong(tag, tags, in_block, in_path, paths=paths, column=column)
        if reason is not None:
            raise MalformedBlocks(f"token {column}: {reason}")
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
    if in_block:
        if not cut:
            open_part = "path" if in_path else "block"
            raise MalformedBlocks(f"token {len(input_ids)}: the text ends in an open {open_part}")
        _check_written(is_written, opened, len(input_ids))
        blocks.append(Block(tuple(paths), None))
    return tuple(blocks)


def drawn_blocks(input_ids: torch.Tensor, tags: ParallelTags) -> tuple[Block, ...]:
    """Return the blocks of a response whose paths were drawn side by side (`drawing`), in order.

    input_ids: int64 [T], of the response alone.

    A model may draw any tag anywhere, so a tag out of place is text: in the trunk all but `<Parallel>`, behind that all
    but `<Path>`, in a path all but `</Path>`. A path ends with its `</Path>`, and a block where no path follows one:
    of a well-formed response without text behind its paths the blocks are those of `find_blocks`.
    """
    is_tag = torch.isin(input_ids, torch.tensor(astuple(tags)))
    blocks: list[Block] = []
    paths: list[int] = []
    awaited, closed = tags.open_block, -1  # the only tag that is one here; the column of the last `</Path>`
    for column in torch.nonzero(is_tag).flatten().tolist():
        tag = int(input_ids[column])
        if paths and awaited == tags.open_path and not (tag == awaited and column == closed + 1):
            blocks.append(Block(tuple(paths), closed + 1))
            paths, awaited = [], tags.open_block
        if tag != awaited:
            continue
        if tag == tags.open_path:
            paths.append(column)
        closed = column if tag == tags.close_path else closed
        awaited = tags.close_path if tag == tags.open_path else tags.open_path
    if paths:
        is_over = awaited == tags.open_path and closed + 1 < len(input_ids)
        blocks.append(Block(tuple(paths), closed + 1 if is_over else None))
    return tuple(blocks)


def _check_written(is_written: torch.Tensor | None, start: int, stop: int) -> None:
    unwritten = [] if is_written is None else torch.nonzero(~is_written[start:stop]).flatten().tolist()
    if unwritten:
        raise MalformedBlocks(f"token {start + unwritten[0]}: a block contains text that the model does not write")


def _what_is_wrong(
    tag: int, tags: ParallelTags, in_block: bool, in_path: bool, *, paths: Sequence[int], column: int
) -> str | None:
    """Return the first rule that `tag` breaks here."""
    rules = [
        (tags.open_block, in_block, "a block opens inside a block"),
        (tags.open_path, not in_block, "a path opens outside of a block"),
        (tags.open_path, in_path, "a path opens inside a path"),
        (tags.close_path, not in_path, "a path closes without having been opened"),
        (tags.close_path, column - 1 in paths, "a path is empty"),
        (tags.close_block, not in_block, "a block closes without having been opened"),
        (tags.close_block, in_path, "a block closes before its last path does"),
        (tags.close_block, not paths, "a block has no paths"),
    ]
    return next((reason for which, is_broken, reason in rules if tag == which and is_broken), None)


def parallel_document(sequence: TokenSequence, tags: ParallelTags, is_written: torch.Tensor | None = None) -> Document:
    """Return a sequence with its blocks laid out side by side; without blocks, `plain(sequence)`.

    is_written: see `find_blocks`. A sequence truncated inside a block is laid out as the beginning of the whole one.
    Raises MalformedBlocks.
    """
    blocks = find_blocks(sequence.input_ids, tags, is_written, cut=True)
    segments = _segments(sequence, blocks, seen=(), position=0, predecessor=None, segments_before=0)
    return Document(tuple(segments), ends=(len(segments) - 1,), owners=((0,),) * len(segments))


def shared_prompt_in_parallel(
    prompt: TokenSequence, responses: Sequence[TokenSequence], tags: ParallelTags
) -> Document:
    """As `shared_prompt`, with the blocks of each response laid out side by side. Raises MalformedBlocks."""
    return _shared(prompt, responses, [find_blocks(response.input_ids, tags, cut=True) for response in responses])


def _shared(
    prompt: TokenSequence, responses: Sequence[TokenSequence], blocks_of: Sequence[tuple[Block, ...]]
) -> Document:
    segments, owners, ends = [Segment(prompt)], [(0,)], []
    for number, (response, blocks) in enumerate(zip(responses, blocks_of, strict=True)):
        own = _segments(
            response, blocks, seen=(0,), position=prompt.positions, predecessor=0, segments_before=len(segments)
        )
        segments += own
        owners += [(number,)] * len(own)
        ends.append(len(segments) - 1)
    return Document(tuple(segments), tuple(ends), tuple(owners))


def drawn_document(prompt: TokenSequence, responses: Sequence[TokenSequence], tags: ParallelTags) -> Document:
    """Return a prompt with responses whose paths were drawn side by side (`drawn_blocks`). Several share the prompt; a
    single one goes on in the prompt's segment, so that without blocks it is `plain`."""
    if len(responses) > 1:
        return _shared(prompt, responses, [drawn_blocks(response.input_ids, tags) for response in responses])
    (response,) = responses
    whole, first = together([prompt, response]), len(prompt)
    blocks = [
        Block(tuple(first + path for path in block.paths), None if block.end is None else first + block.end)
        for block in drawn_blocks(response.input_ids, tags)
    ]
    segments = _segments(whole, blocks, seen=(), position=0, predecessor=None, segments_before=0)
    return Document(tuple(segments), ends=(len(segments) - 1,), owners=((0,),) * len(segments))


def _segments(
    sequence: TokenSequence,
    blocks: Sequence[Block],
    seen: tuple[int, ...],
    position: int,
    *,
    predecessor: int | None,
    segments_before: int,
) -> list[Segment]:
    """Return the segments of `sequence`, which sees `seen`, starts at `position`, predicted from `predecessor`."""
    made: list[Segment] = []
    assert not sequence.media, "positions here count tokens"

    def add(start: int, stop: int, sees: tuple[int, ...], first_position: int, *, predicted_from: int | None) -> int:
        made.append(Segment(sequence.part(start, stop), sees, first_position, predicted_from))
        return segments_before + len(made) - 1

    start = 0
    for block in blocks:
        if not block.paths:  # truncated in the block's opening
            break
        opening = add(start, block.paths[0], seen, position, predicted_from=predecessor)
        seen = (*seen, opening)
        position += block.paths[0] - start
        stops = (*block.paths[1:], len(sequence) if block.end is None else block.end)
        spans = list(zip(block.paths, stops, strict=True))
        paths = tuple(add(first, stop, seen, position, predicted_from=opening) for first, stop in spans)
        seen = (*seen, *paths)
        position += max(stop - first for first, stop in spans)
        predecessor = paths[-1]
        start = stops[-1]
    if start < len(sequence):
        add(start, len(sequence), seen, position, predicted_from=predecessor)
    return made
