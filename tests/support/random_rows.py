"""Rows of random documents: plain ones, shared prompts and parallel paths."""

from __future__ import annotations

import torch

from tests.support.tiny_models import VOCABULARY
from training.utils.contracts.documents import Document, Segment, TokenSequence, plain, shared_prompt
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows


def random_rows(generator: torch.Generator, rows: int, longest: int, with_before: bool = False) -> TokenRows:
    """`rows` rows of one to six documents, each segment of at most `longest` tokens."""

    def below(limit: int) -> int:
        return int(torch.randint(1, limit + 1, (1,), generator=generator))

    def sequence(is_target: bool) -> TokenSequence:
        ids = torch.randint(10, VOCABULARY, (below(longest),), generator=generator)
        return TokenSequence(ids, torch.full(ids.shape, is_target))

    def document() -> Document:
        if below(3) == 1:
            return plain(sequence(False))
        return shared_prompt(sequence(False), [sequence(True) for _ in range(below(3))])

    return packed_rows([[document() for _ in range(below(6))] for _ in range(rows)], 0, with_before=with_before)


def parallel_row() -> TokenRows:
    """One row of some 400 tokens: a document in which parts that do not see each other follow a trunk, which goes on
    behind them and sees all, three times; and a plain one behind it."""
    segments: list[Segment] = []
    at, lengths = 0, ((51, (52, 8)), (42, (52, 8)), (1, (52, 8)), (11, ()))

    def add(tokens: int, sees: tuple[int, ...], predecessor: int | None) -> int:
        is_target = torch.ones(tokens, dtype=torch.bool)
        is_target[0] = predecessor is not None
        sequence = TokenSequence(torch.arange(tokens) % 50 + 10, is_target)
        segments.append(Segment(sequence, sees, at, predecessor))
        return len(segments) - 1

    before: tuple[int, ...] = ()
    for trunk, parts in lengths:
        opening = add(trunk, before, before[-1] if before else None)
        before, at = (*before, opening), at + trunk
        before = (*before, *[add(tokens, before, opening) for tokens in parts])
        at += max(parts, default=0)
    document = Document(tuple(segments), ends=(len(segments) - 1,), owners=((0,),) * len(segments))
    behind = TokenSequence(torch.arange(10, 60), torch.zeros(50, dtype=torch.bool))
    return packed_rows([[document, plain(behind)]], 0)
