"""Rows of random documents: plain ones, shared prompts and parallel paths."""

from __future__ import annotations

import torch

from tests.support.parallel_texts import TAGS, Path, Text
from tests.support.tiny_models import VOCABULARY
from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.parallel import parallel_document
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
    """One row of 400 tokens: a text with two blocks of paths, and a plain one behind it."""
    paths = (Path(range(10, 60)), Path(range(10, 15), behind=(11,)))
    text = Text().trunk(*range(10, 60)).block(*paths).trunk(*range(10, 50)).block(*paths, *paths).trunk(*range(10, 20))
    behind = TokenSequence(torch.arange(10, 60), torch.zeros(50, dtype=torch.bool))
    return packed_rows([[parallel_document(text.sequence(), TAGS), plain(behind)]], 0)
