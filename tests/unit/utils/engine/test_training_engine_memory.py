"""A computation that runs out of memory names the lengths of its rows."""

from __future__ import annotations

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, plain
from training.utils.engine.training_engine import memory_explained, rows_in_words
from training.utils.layout.rows import packed_rows


def rows(*lengths: tuple[int, ...]):
    def document(length: int):
        return plain(TokenSequence(torch.arange(length), torch.arange(length) > 0))

    return packed_rows([[document(length) for length in row] for row in lengths], 0)


def test_rows_in_words():
    words = rows_in_words(rows((3, 2), (4,)))
    assert words == "2 rows of 5 tokens (3 sequences; tokens per row without padding: 5, 4)"
    assert rows_in_words(rows(*[(1,)] * 17)).endswith("1, 1, ...)") and rows_in_words(None) == "a micro-batch"


@pytest.mark.parametrize(
    "problem",
    [torch.cuda.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")],
)
def test_the_allocators_refusal_is_explained(problem):
    with pytest.raises(ThreestepError) as error, memory_explained("a forward", 1, lambda: rows_in_words(rows((7,)))):
        raise problem
    assert str(error.value).startswith("out of memory on rank 1 in a forward of 1 row of 7 tokens (1 sequences;")
    assert "--max_tokens_per_micro_batch" in str(error.value) and str(problem) in str(error.value)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shapes"), memory_explained("a forward", 0, str):
        raise RuntimeError("shapes differ")
